"""`--zorse-metrics`: what stock prints, in full precision, on one rank, with or without a plan."""

import json
from pathlib import Path

import pytest

from tests.megatron.launch import run_ranks
from tests.megatron.small_run import small_run_flags
from tests.megatron.stock_log import iterations
from zorse_megatron.plan.plan import Chunk, Group, ModelFingerprint, Plan, Replica, Schedule
from zorse_megatron.plan.plan_file import save_plan

STEPS = 3


def replica(rank: int, size: int, count: int) -> Replica:
    return Replica(ranks=(rank,), micro_batch_size=size, num_microbatches=count, shard_weight=1.0)


# The job's last rank is in the first group: it hears of the loss from another rank.
PLAN = Plan(
    schema_version=2,
    global_batch_size=8,
    model=ModelFingerprint(num_layers=4),
    groups=(
        Group(replicas=(replica(1, 3, 2), replica(2, 2, 1))),
        Group(replicas=(replica(0, 4, 2),)),
    ),
    chunks=(Chunk(group=0, layers=(0, 1)), Chunk(group=1, layers=(1, 4))),
    schedule=Schedule(name="1f1b"),
)


@pytest.mark.parametrize("under_plan", [False, True], ids=["stock", "plan"])
def test_agrees_with_what_stock_prints(
    under_plan: bool, corpus_prefix: Path, tmp_path: Path
) -> None:
    save_plan(PLAN, tmp_path / "plan.json")
    metrics = tmp_path / "new folder" / "metrics.jsonl"
    flags = [*small_run_flags(corpus_prefix, train_iters=STEPS), "--zorse-metrics", str(metrics)]
    if under_plan:
        flags += ["--zorse-plan", str(tmp_path / "plan.json")]
    world_size = PLAN.world_size if under_plan else 2
    result = run_ranks(flags, world_size, timeout_s=120).check()
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    printed = iterations(result.outputs[-1])
    assert [record["iteration"] for record in records] == list(range(1, STEPS + 1))
    assert len(printed) == STEPS
    losses = [record["lm loss"] for record in records]
    # Stock's second line averages two iterations, because the first does not reset the sums.
    losses[1] = (losses[0] + losses[1]) / 2
    for record, loss, line in zip(records, losses, printed, strict=True):
        assert loss == pytest.approx(line.lm_loss, rel=1e-6)
        assert record["grad_norm"] == pytest.approx(line.grad_norm, abs=6e-4)
        assert record["loss_scale"] == line.loss_scale
        assert record["consumed_samples"] == 8 * record["iteration"]
        assert record["learning_rate"] == 1e-2
        assert record["skipped"] is False
    assert [record["elapsed_s"] is None for record in records] == [True, False, False]


def test_a_file_is_continued(corpus_prefix: Path, tmp_path: Path) -> None:
    """As a log is: a job that is started again must not lose what the first one wrote."""
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text('{"iteration": 0}\n')
    flags = [*small_run_flags(corpus_prefix, train_iters=2), "--zorse-metrics", str(metrics)]
    run_ranks(flags, 1, timeout_s=120).check()
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [record["iteration"] for record in records] == [0, 1, 2]
