"""The demo from end to end, on a smaller cluster, with smaller batches and fewer iterations."""

import json
from pathlib import Path

import pytest

from tests.megatron.launch import MegatronServer
from tests.megatron.stock_log import iterations
from zorse_megatron.plan.plan_file import load_plan

ITERATIONS = 4
# Each process trains in turns with the others on few cores.
CLUSTER = "nodes: [{gpus: [1 x A10G, 1 x T4]}]\n"


def test_the_demo_runs(tmp_path: Path, megatron_server: MegatronServer) -> None:
    (tmp_path / "mixed.yaml").write_text(CLUSTER)
    words = ["--cluster", "mixed.yaml", "--output", "out", "--iterations", str(ITERATIONS)]
    said = (
        megatron_server.run_ranks(
            words, 1, entry="tests.megatron.demo_entry", timeout_s=400, directory=tmp_path
        )
        .check()
        .outputs[0]
    )
    assert "  zorse plan --cluster mixed.yaml --model llama-1b " in said
    assert "Stock Megatron" in said and "(simulated" in said
    plan = load_plan(tmp_path / "out" / "plan.json")
    assert plan.cluster is not None and plan.cluster.gpu_kinds == ("A10G", "T4")
    assert "│ A10G" in said and "│ T4" in said
    assert f"The two runs are the same. {ITERATIONS} iterations: losses differ" in said
    assert said.splitlines()[-1].strip().startswith("zorse plan --cluster cluster.yaml ")
    runs = tmp_path / "out" / "runs"
    losses = {}
    for name, log in (("stock", "rank_0.txt"), ("plan", "rank_1.txt")):
        lines = (runs / name / "metrics.jsonl").read_text().splitlines()
        losses[name] = [json.loads(line)["lm loss"] for line in lines]
        text = (runs / name / log).read_text()
        assert [line.iteration for line in iterations(text)] == list(range(1, ITERATIONS + 1))
    assert losses["plan"] == pytest.approx(losses["stock"], abs=2e-5, rel=0)
    assert (tmp_path / "out" / "loss.png").stat().st_size > 0
