"""README's section "Train with a plan": its commands, on a plan of five ranks."""

import json
import shlex
from pathlib import Path

import pytest

from tests.megatron.launch import MegatronServer
from tests.megatron.small_run import TOKENIZER_FLAGS
from tests.megatron.upstream import SCRIPT
from tests.printed import run_zorse
from tests.unit.test_docs import commands_in, text_of
from zorse_megatron.doctor.plans import UNEVEN_PLAN
from zorse_megatron.flags.table import WITHOUT_WORKERS
from zorse_megatron.plan.plan_file import save_plan

TRAIN = "torchrun --nproc-per-node "
FLAGS = (
    *("--num-layers", "6", "--hidden-size", "96", "--num-attention-heads", "4"),
    *("--seq-length", "64", "--max-position-embeddings", "64", "--global-batch-size", "24"),
    *("--mock-data", *TOKENIZER_FLAGS, *WITHOUT_WORKERS, "--train-iters", "2", "--lr", "1e-3"),
    *("--log-interval", "1", "--eval-interval", "1000", "--eval-iters", "1"),
)


def test_its_commands_run(
    megatron_server: MegatronServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save_plan(UNEVEN_PLAN, "plan.json")
    section = text_of("README.md").partition("## Train with a plan")[2].partition("\n## ")[0]
    lines = [line for line in commands_in("README.md") if line in section]
    assert len(lines) == 2
    for line in lines:
        if line.startswith(TRAIN):
            train(megatron_server, shlex.split(line), tmp_path)
        else:
            run_zorse(shlex.split(line))


def train(server: MegatronServer, words: list[str], directory: Path) -> None:
    """Start what torchrun would, with Megatron's flags, and NVIDIA's script where it is there."""
    number, module, script, placeholder, *ours = words[2], *words[4:]
    assert (script, placeholder) == ("pretrain_gpt.py", "MEGATRON_FLAGS")
    ours[ours.index("plan.json")] = str(directory / "plan.json")
    metrics = directory / "metrics.jsonl"
    argv = [*SCRIPT, *FLAGS, *ours, "--zorse-metrics", str(metrics)]
    server.run_ranks(argv, int(number), entry=module, timeout_s=120).check()
    steps = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [step["iteration"] for step in steps] == [1, 2]
