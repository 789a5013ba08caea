"""The lines that `zorse launch --stock` prints, run by the real torchrun on two pretended nodes."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.megatron.launch import ON_GPU, REPOSITORY, MegatronServer
from tests.megatron.small_run import small_run_flags
from tests.megatron.stock_log import iterations
from tests.printed import run_zorse
from tests.slurm import forked_ranks
from tests.unit.test_stock_plans import inputs_for
from zorse_megatron.plan.plan import ClusterFingerprint
from zorse_megatron.plan.plan_file import save_plan
from zorse_megatron.planner.baselines.stock_layouts import Grid, plan_of_grid
from zorse_megatron.processes import free_port

SCRIPT = REPOSITORY / "tests" / "megatron" / "stock_script.py"
CLUSTER = """\
nodes:
  - {name: left, gpus: 1 x A6000, nics: 10 Gb/s}
  - {name: right, gpus: 1 x T4, nics: 10 Gb/s}
"""
# The second node first.
GRID = Grid(layers=(1, 3), width=1, micro_batch_size=2, mode="full", recomputed=1)
ORDER = (1, 0)
STEPS = 3
# Losses are printed with six digits after the point; layouts differ by rounding.
MAX_DIFFERENCE = 2e-6
TIMEOUT_S = 240
# Of the two ranks one is started as a reader's is.
PYTHON = f"""#!/bin/bash
if [[ $RANK != 0 ]]; then
    exec {sys.executable} -S -E {forked_ranks.__file__} "$@"
fi
exec {sys.executable} "$@"
"""


def losses(output: str) -> list[float]:
    return [line.lm_loss for line in iterations(output) if line.lm_loss is not None]


@pytest.mark.skipif(ON_GPU, reason="two nodes share one machine's GPUs")
def test_an_uneven_layout_loses_what_one_process_does(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    corpus_prefix: Path,
    megatron_server: MegatronServer,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("cluster.yaml").write_text(CLUSTER)
    inputs = inputs_for(GRID, 4)
    inputs.cluster = ClusterFingerprint(gpu_kinds=("A6000", "T4"))
    save_plan(plan_of_grid(inputs, GRID, ORDER), Path("plan.json"))
    flags = small_run_flags(corpus_prefix, train_iters=STEPS)
    # Layouts draw different weights from the same seed: both runs start from these.
    still = ["--lr", "0", "--min-lr", "0", "--weight-decay", "0", "--train-iters", "1"]
    alone = {"entry": "tests.megatron.stock_script", "timeout_s": TIMEOUT_S, "directory": tmp_path}
    megatron_server.run_ranks(
        [*flags, *still, "--save", "weights", "--save-interval", "1"], 1, **alone
    ).check()
    flags += ["--load", "weights", "--finetune", "--no-load-optim", "--no-load-rng"]
    expected = losses(megatron_server.run_ranks(flags, 1, **alone).check().outputs[0])

    launch = ["zorse", "launch", "plan.json", "--cluster", "cluster.yaml", "--stock", "--torchrun"]
    meeting = ("--master-addr", "127.0.0.1", "--master-port", str(free_port()))
    said = run_zorse([*launch, *meeting, "--", str(SCRIPT), *flags])
    lines = [line for line in said.splitlines() if line and line[0] != "#"]
    assert len(lines) == 2 and not any("zorse_megatron" in line for line in lines)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    python = tmp_path / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    variables = {"PATH": path, "PYTHONPATH": str(REPOSITORY), "PYTHON_EXEC": str(python)}
    with contextlib.ExitStack() as stack:
        variables |= stack.enter_context(forked_ranks.forking_server())
        outputs = [tmp_path / f"node-{number}.txt" for number in range(2)]
        nodes = []
        for line, output in zip(lines, outputs, strict=True):
            file = stack.enter_context(output.open("w"))
            nodes.append(
                subprocess.Popen(
                    ["bash", "-c", f"exec env {line}"],
                    env=os.environ | variables,
                    stdout=file,
                    stderr=file,
                )
            )
        try:
            ended = [node.wait(timeout=TIMEOUT_S) for node in nodes]
        finally:
            for node in nodes:
                node.terminate()
    texts = [output.read_text() for output in outputs]
    assert ended == [0, 0], texts
    found = losses(texts[1])
    assert len(found) == STEPS and found[0] - found[-1] > 100 * MAX_DIFFERENCE
    assert found == pytest.approx(expected, abs=MAX_DIFFERENCE)
    ranks = [line for text in texts for line in text.splitlines() if "started with" in line]
    assert [line.split()[3:5] for line in ranks] == [[f"RANK={r}", "LOCAL_RANK=0"] for r in (0, 1)]
