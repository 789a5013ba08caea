"""Other counts of micro-batches between two steps: the curve stays that of one process."""

import json
import re
from pathlib import Path

import pytest

from tests.megatron.comparison import MASKED, assert_follows, flags_for, plan_run, stock_run
from tests.megatron.plans import plan_of, replica

STEPS = 17
PLAN = plan_of(
    ((replica(0, 1, 5, 3.0), replica(1, 1, 3, 1.0)), 1),
    ((replica(2, 1, 4, 0.5), replica(3, 2, 2, 2.0), replica(4, 1, 0, 1.0)), 3),
)
WISHES = {
    1: ((3, 5), (4, 2, 0)),
    6: ((2, 6), (2, 3, 0)),
    11: ((5, 3), (4, 2, 0)),
}


@pytest.mark.parametrize("workers", [0, 1])
def test_the_curve_goes_on_through_changes(workers: int, corpus: Path) -> None:
    """Three changes, with an evaluation between, and data loaders that are ahead."""
    evaluating = ("--eval-interval", "4", "--eval-iters", "1")
    flags = flags_for(corpus, *MASKED, *evaluating, steps=STEPS)
    run = plan_run(
        PLAN,
        (*flags, "--num-workers", str(workers), "--zorse-rebalance", "on"),
        entry="tests.megatron.rebalancing_entry",
        env={"ZORSE_TEST_WISHES": json.dumps(WISHES)},
    )
    said = re.findall(r"zorse: replicas of group (\d) run ([\d, ]+) micro-batches", run.outputs[0])
    assert said == [
        ("0", "3, 5"),
        *(("0", "2, 6"), ("1", "2, 3, 0")),
        *(("0", "5, 3"), ("1", "4, 2, 0")),
    ]
    assert_follows(run, stock_run(flags))
