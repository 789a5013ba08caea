"""A plan that equals a stock layout does no more in a step than stock does."""

from pathlib import Path

import pytest

from scripts.bench_executor_overhead import MICRO_BATCH_SIZE, Layout
from scripts.validation.step_counts import counts_of
from tests.megatron.profiled_entry import iterations
from tests.megatron.small_run import small_run_flags
from zorse_megatron.plan.plan_file import save_plan

pytestmark = pytest.mark.slow

SENDS = ("all_reduce", "broadcast", "send")
MORE = 1.02
"""Where both do nearly the same, in other ways."""


def test_a_step_does_no_more_than_stock(corpus_prefix: Path, tmp_path: Path) -> None:
    layout = Layout(stages=1, replicas=1, degree=2)
    save_plan(layout.plan(), tmp_path / "plan.json")
    flags = [
        *small_run_flags(corpus_prefix, train_iters=iterations(1)),
        *("--tensor-model-parallel-size", "2", "--use-distributed-optimizer"),
        *("--micro-batch-size", str(MICRO_BATCH_SIZE)),
        *("--global-batch-size", str(layout.global_batch_size), "--calculate-per-token-loss"),
    ]
    stock = counts_of(flags, 2, tmp_path, steps=1)
    plan = counts_of([*flags, "--zorse-plan", str(tmp_path / "plan.json")], 2, tmp_path, steps=1)
    assert stock["operations of torch"] > 1000 and stock["all_reduce"] > 8 * 16
    for name in SENDS:
        assert plan.get(name, 0) <= stock.get(name, 0), name
    assert plan["copies"] < stock["copies"]
    assert plan["threads"] < stock["threads"]
    for name in ("operations of torch", "allocations", "Python calls"):
        assert plan[name] <= MORE * stock[name], name
