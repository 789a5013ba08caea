"""Other counts of micro-batches between two steps: the curve stays that of one process."""

import json
import re
from pathlib import Path

from tests.megatron.comparison import MASKED, assert_follows, flags_for, plan_run, stock_run
from tests.megatron.plans import plan_of, replica

STEPS = 12
PLAN = plan_of(
    ((replica(0, 1, 5, 3.0), replica(1, 1, 3, 1.0)), 1),
    ((replica(2, 1, 4, 0.5), replica(3, 2, 2, 2.0), replica(4, 1, 0, 1.0)), 3),
)
WISHES = {
    1: ((3, 5), (4, 2, 0)),
    6: ((5, 3), (2, 3, 0)),
}


def test_the_curve_goes_on_through_changes(corpus: Path) -> None:
    """Two changes, with an evaluation between, and data loaders that are ahead."""
    evaluating = ("--eval-interval", "4", "--eval-iters", "1")
    flags = flags_for(corpus, *MASKED, *evaluating, steps=STEPS)
    run = plan_run(
        PLAN,
        (*flags, "--num-workers", "1", "--zorse-rebalance", "on"),
        entry="tests.megatron.rebalancing_entry",
        env={"ZORSE_TEST_WISHES": json.dumps(WISHES)},
    )
    said = re.findall(r"zorse: replicas of group (\d) run ([\d, ]+) micro-batches", run.outputs[0])
    assert said == [
        ("0", "3, 5"),
        *(("0", "5, 3"), ("1", "2, 3, 0")),
    ]
    assert_follows(run, stock_run(flags))
