"""What ranks send in a step is the closed form of the plan, to the byte.

A group of n ranks that gathers a chunk of P elements sends (n - 1) P elements of parameters, and as
many of gradients when it reduces them, whatever the number of micro-batches; in half the bytes with
a `grad_reduce_dtype`. Between neighbouring
chunks of different groups every sample's activation goes forward once and its gradient back once.
What waits in the host goes there and comes back no more often than it must.
"""

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.megatron.comparison import GLOBAL_BATCH_SIZE, UNTIED, flags_for
from tests.megatron.launch import run_ranks
from tests.megatron.plans import (
    LAYERED,
    LAYOUTS,
    NEIGHBOURS,
    TWO_BY_TWO,
    in_the_host,
    plan_of,
    replica,
    sending_in,
    tp_replica,
    with_settings,
)
from zorse_megatron.plan.plan import Plan, Schedule
from zorse_megatron.plan.plan_file import save_plan

HIDDEN, SEQUENCE, VOCABULARY = 32, 32, 256
ELEMENT_BYTES = 4
LAYER = 12 * HIDDEN**2 + 13 * HIDDEN
STEPS = 2


def each(plan: Plan, *gathers: int) -> tuple[Plan, dict[int, int]]:
    return plan, dict(enumerate(gathers))


# Plan, and how often each chunk's parameters are gathered in a step.
CASES = {
    "interleaved": each(
        with_settings(TWO_BY_TWO, schedule=Schedule(name="interleaved")), 1, 1, 1, 1
    ),
    "breadth first, the last two of a group once": each(NEIGHBOURS, 2, 1, 1, 1),
    "1f1b, half the gradients of one group": each(
        sending_in(LAYOUTS["2|1|2"], None, None, "bf16"), 1, 1, 1
    ),
    "layered accumulation, half the gradients": each(sending_in(LAYERED, "bf16"), 2, 2, 1, 1),
}


def parameters_of(plan: Plan, chunk: int) -> int:
    """Parameters of an untied GPT's chunk."""
    first, stop = plan.chunks[chunk].layers
    total = (stop - first) * LAYER
    if chunk == 0:
        total += (VOCABULARY + SEQUENCE) * HIDDEN
    if chunk == len(plan.chunks) - 1:
        total += VOCABULARY * HIDDEN + 2 * HIDDEN
    return total


def counted(plan: Plan, corpus: Path, work: Path) -> list[dict[str, Any]]:
    """What each rank has counted."""
    save_plan(plan, work / "plan.json")
    flags = [*flags_for(corpus, *UNTIED, steps=STEPS), "--zorse-plan", str(work / "plan.json")]
    run_ranks(
        flags,
        plan.world_size,
        entry="tests.megatron.traffic_entry",
        timeout_s=120,
        env={"ZORSE_TEST_RECORD": str(work)},
    ).check()
    return [
        json.loads((work / f"traffic-rank{rank}.json").read_text())
        for rank in range(plan.world_size)
    ]


@pytest.mark.parametrize("case", CASES)
def test_traffic_is_the_closed_form(case: str, corpus: Path, tmp_path: Path) -> None:
    plan, gathers = CASES[case]
    found = counted(plan, corpus, tmp_path)
    for number, group in enumerate(plan.groups):
        chunks = plan.chunks_of_group(number)
        elements = {}
        for index, chunk in enumerate(chunks):
            (held,) = {tuple(found[rank]["chunks"][index].values()) for rank in group.ranks}
            elements[chunk], parameters = held
            assert parameters == parameters_of(plan, chunk)
            # Stock starts each parameter on a multiple of 64 elements.
            assert parameters <= elements[chunk] < 1.2 * parameters
        others = len(group.ranks) - 1
        for step in range(STEPS):
            total = sum((Counter(found[rank]["steps"][step]) for rank in group.ranks), Counter())
            moved = sum(gathers[chunk] * elements[chunk] for chunk in chunks)
            assert total["parameters sent"] == total["parameters received"]
            assert total["parameters sent"] == others * moved * ELEMENT_BYTES
            assert total["gradients sent"] == total["gradients received"]
            element_bytes = ELEMENT_BYTES if group.grad_reduce_dtype is None else 2
            assert total["gradients sent"] == others * sum(elements.values()) * element_bytes
    sample_bytes = SEQUENCE * HIDDEN * ELEMENT_BYTES
    crossings = sum(one.group != other.group for one, other in pairwise(plan.chunks))
    for step in range(STEPS):
        total = sum((Counter(ranks["steps"][step]) for ranks in found), Counter())
        expected = 2 * crossings * GLOBAL_BATCH_SIZE * sample_bytes
        assert total["activations sent"] == total["activations received"] == expected


def test_traffic_with_the_host_is_the_closed_form(corpus: Path, tmp_path: Path) -> None:
    """Over all ranks: state goes and comes once in a step, and so do the parameters for it.

    A shard of parameters comes once more for each gather, and nothing goes back for that. Each
    layer's input goes and comes once, but for the last chunk, where backwards come at once, and for
    the chunk before it on rank 2, which has one micro-batch of 3 samples: it would leave beside the
    last forward and be brought back beside its backward. Reduced gradients go once, but for the
    chunk reduced last, and come twice: for the norm and the step.
    """
    found = counted(in_the_host(LAYERED), corpus, tmp_path)
    held = found[0]["chunks"]
    state = sum(2 * ELEMENT_BYTES * chunk["parameters"] for chunk in held)
    parameters = [ELEMENT_BYTES * chunk["elements"] for chunk in held]
    gathers = (2, 2, 1, 1)
    fetched = sum(count * size for count, size in zip(gathers, parameters, strict=True))
    sample_bytes = SEQUENCE * HIDDEN * ELEMENT_BYTES
    kept = (3 * GLOBAL_BATCH_SIZE - 3) * sample_bytes
    gradients = sum(parameters[1:])
    for step in range(1, STEPS):  # the first also sends all there is
        total = sum((Counter(ranks["steps"][step]) for ranks in found), Counter())
        assert total["to the host"] == state + sum(parameters) + kept + gradients
        assert total["from the host"] == state + sum(parameters) + fetched + kept + 2 * gradients


def test_traffic_of_sets_is_the_closed_form(corpus: Path, tmp_path: Path) -> None:
    """Of what is cut each element crosses once to be summed and once to be known.

    What the TP group of two holds whole is told to three ranks. An activation crosses once.
    """
    unlike = (tp_replica((0, 1), 2, 3, 2.0), replica(2, 1, 2, 1.0))
    found = counted(plan_of((unlike, 2), ((tp_replica((3, 4), 4, 2),), 2)), corpus, tmp_path)
    layers = 2
    cut = layers * (12 * HIDDEN**2 + 7 * HIDDEN) + VOCABULARY * HIDDEN
    whole = layers * 6 * HIDDEN + SEQUENCE * HIDDEN
    # Before the first step parameters are gathered once more.
    for ranks in zip(*(each["steps"][1:] for each in found), strict=True):
        exchanged = sum(each.get("gradients sent", 0) for each in ranks[:3])
        assert exchanged == ELEMENT_BYTES * (2 * cut + 3 * whole)
        activations = 2 * GLOBAL_BATCH_SIZE * SEQUENCE * HIDDEN * ELEMENT_BYTES
        assert sum(each["activations sent"] for each in ranks) == activations
        assert sum(each["activations received"] for each in ranks) == activations
