"""Two-level sums and gathers between regions: training follows stock's single process."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.megatron.comparison import chunked_plan, plan_of, plan_run, replica, stock_run
from tests.megatron.test_exactness import MASKED, assert_equal_runs, flags_for
from zorse_megatron.plan.plan import Group, Plan


def hierarchical(plan: Plan, regions: str) -> Plan:
    """The plan, with the first group's replicas in these regions, one letter for each."""
    first, *others = plan.groups
    placed = zip(first.replicas, regions, strict=True)
    replicas = tuple(replace(each, region=region) for each, region in placed)
    group: Group = replace(first, replicas=replicas, hierarchical=True)
    return replace(plan, groups=(group, *others))


TRIO = plan_of(
    ((replica(0, 1, 3, 1.0), replica(1, 1, 4, 3.0), replica(2, 1, 1, 1.0)), 2),
    ((replica(3, 4, 2),), 2),
)
PLANS = {
    "breadth first, an idle rank and one without a shard": hierarchical(
        chunked_plan(
            [
                (
                    replica(0, 1, 3, 2.0),
                    replica(1, 3, 1, 0.0),
                    replica(2, 1, 0, 1.0),
                    replica(3, 2, 1, 1.5),
                )
            ],
            [(0, 1)] * 4,
        ),
        "wwee",
    ),
    "1f1b, three regions": hierarchical(TRIO, "abc"),
}


@pytest.mark.parametrize("name", PLANS)
def test_follows_stock(name: str, corpus: Path) -> None:
    flags = flags_for(corpus, *MASKED, "--clip-grad", "0.5")
    assert_equal_runs(plan_run(PLANS[name], flags), stock_run(flags))
