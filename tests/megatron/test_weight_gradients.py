"""Weight gradients that are computed apart are those of the same plan without it, bit for bit."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from tests.megatron.comparison import LAYOUTS, chunked_plan, plan_of, plan_run, replica
from tests.megatron.ministages import BOTH_ENDS, TWO_BY_TWO, in_the_host, with_settings
from tests.megatron.set_plans import set_of
from tests.megatron.test_exactness import MASKED, UNTIED, flags_for
from tests.megatron.test_tensor_parallel import LLAMA, SEQUENCE_PARALLEL, assert_same_bits
from zorse_megatron.plan.plan import Plan, Recompute, Schedule
from zorse_megatron.schedule.actions import Kind
from zorse_megatron.schedule.lower import lower_plan

SET = (set_of((0, 1), 2, 3, 2.0), replica(2, 1, 2, 1.0))


def split(plan: Plan, *numbers: int) -> Plan:
    """The plan with `split_backward` in some groups; without numbers in all."""
    return replace(
        plan,
        groups=tuple(
            replace(group, split_backward=not numbers or number in numbers)
            for number, group in enumerate(plan.groups)
        ),
    )


ENGINE = "interleaved, layers as Transformer Engine's"

# Plan, and flags beyond those of all runs; tied embeddings unless these say otherwise.
CASES: dict[str, tuple[Plan, tuple[str, ...]]] = {
    "1f1b, tied, overlap": (
        LAYOUTS["1|1|1|1"],
        ("--overlap-grad-reduce", "--ddp-num-buckets", "3"),
    ),
    "1f1b, fp16, unequal replicas, clipping": (
        plan_of(((replica(0, 2, 4),), 2), ((replica(1, 2, 2, 3.0), replica(2, 1, 4)), 2)),
        ("--fp16",),
    ),
    "breadth first, shards, full recomputation": (
        with_settings(TWO_BY_TWO, Recompute(mode="full")),
        UNTIED,
    ),
    "breadth first, everything in the host": (in_the_host(BOTH_ENDS), ()),
    ENGINE: (
        with_settings(TWO_BY_TWO, schedule=Schedule(name="interleaved")),
        (),
    ),
    "sets, llama, sequence parallel": (
        plan_of(((replica(3, 4, 2),), 2), (SET, 2)),
        (*LLAMA, *SEQUENCE_PARALLEL),
    ),
    "sets beside a rank, breadth first": (
        chunked_plan([SET, (replica(3, 4, 2),)], [(0, 1), (1, 1), (0, 1), (1, 1)]),
        UNTIED,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_weights_are_those_of_the_plan_without_it(name: str, corpus: Path) -> None:
    """Losses, norms and weights; and some weight gradients wait while another backward runs."""
    plan, more = CASES[name]
    flags = flags_for(corpus, *MASKED, "--clip-grad", "0.5", *more)
    assert any(waits(actions) for actions in lower_plan(split(plan)).ranks)
    entry = {"entry": "tests.megatron.engine_like_entry"} if name == ENGINE else {}
    assert_same_bits(plan_run(split(plan), flags, **entry), plan_run(plan, flags))


def waits(actions) -> bool:
    """Whether a backward stands between another one and its weight gradients."""
    kinds = [a.kind for a in actions if a.kind in (Kind.BACKWARD, Kind.WEIGHT_GRADIENT)]
    return (Kind.BACKWARD, Kind.BACKWARD) in pairwise(kinds)
