"""Tensor-parallel sets of a plan follow a stock single process, as other plans do.

Tolerances are those of `test_exactness`. Each rank's parameters are compared with the slices that
it is to hold (`set_plans.expected_part`).
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.megatron.comparison import (
    GLOBAL_BATCH_SIZE,
    Recorded,
    chunked_plan,
    plan_of,
    plan_run,
    replica,
    run_recorded,
    stock_run,
)
from tests.megatron.launch import run_ranks
from tests.megatron.set_plans import largest_difference, set_of
from tests.megatron.test_exactness import (
    MASKED,
    MAX_LOSS_DIFFERENCE,
    MAX_RELATIVE_GRAD_NORM_DIFFERENCE,
    MAX_RELATIVE_WEIGHT_DIFFERENCE,
    UNTIED,
    flags_for,
)
from tests.megatron.test_traffic import ELEMENT_BYTES, HIDDEN, SEQUENCE, VOCABULARY
from zorse_megatron.plan.plan import Offload, Parts, Plan, Recompute
from zorse_megatron.plan.plan_file import save_plan

UNLIKE = (set_of((0, 1), 2, 3, 2.0), replica(2, 1, 2, 1.0))
"""A set of two ranks beside one rank, of other micro-batches and shards."""
SEQUENCE_PARALLEL = ("--sequence-parallel",)
DEGREE = ("--tensor-model-parallel-size", "2")
LLAMA = (
    *("--swiglu", "--disable-bias-linear", "--position-embedding-type", "rope"),
    *("--normalization", "RMSNorm", "--group-query-attention", "--num-query-groups", "2"),
)


def in_the_host(plan: Plan) -> Plan:
    """All that may be."""
    groups = tuple(
        replace(
            group,
            recompute=Recompute(mode="full"),
            offload=Offload(activations=True, optimizer_state=True),
        )
        for group in plan.groups
    )
    return replace(plan, groups=groups)


SELECTIVE = replace(set_of((0, 1), 2, 3, 2.0), recompute=Recompute(mode="selective"))
# Plan, and flags beyond those of all runs.
CASES: dict[str, tuple[Plan, tuple[str, ...]]] = {
    "4, the command says 2": (
        plan_of(((set_of((0, 1, 2, 3), 2, 4),), 4)),
        DEGREE,
    ),
    "2+1|1, tied": (plan_of((UNLIKE, 2), ((replica(3, 4, 2),), 2)), ()),
    "1|2+1, llama, sequence parallel": (
        plan_of(((replica(3, 4, 2),), 2), (UNLIKE, 2)),
        (*LLAMA, *SEQUENCE_PARALLEL),
    ),
    "2+2, overlap, sequence parallel, one set recomputes attention": (
        plan_of(((SELECTIVE, set_of((2, 3), 1, 2, 1.0)), 4)),
        (*SEQUENCE_PARALLEL, "--overlap-grad-reduce", "--ddp-num-buckets", "3"),
    ),
    "2+1 1, chunks in turn, in the host": (
        in_the_host(chunked_plan([UNLIKE, (replica(3, 4, 2),)], [(0, 1), (1, 1), (0, 1), (1, 1)])),
        UNTIED,
    ),
}


def stock_of(flags: tuple[str, ...]) -> Recorded:
    """The single process that does the same."""
    without = [flag for flag in flags if flag not in (*SEQUENCE_PARALLEL, "--overlap-grad-reduce")]
    if DEGREE[0] in without:
        at = without.index(DEGREE[0])
        del without[at : at + len(DEGREE)]
    return stock_run(tuple(without))


def assert_follows(plan: Plan, run: Recorded, stock: Recorded, *, is_gated: bool = False) -> None:
    assert_equal_steps(run, stock)
    difference = largest_difference(plan, run, stock.final, is_gated=is_gated)
    assert difference <= MAX_RELATIVE_WEIGHT_DIFFERENCE


def assert_equal_steps(run: Recorded, stock: Recorded) -> None:
    assert len(run.losses) == len(stock.losses) > 0
    for mine, theirs in zip(run.losses, stock.losses, strict=True):
        assert abs(mine - theirs) <= MAX_LOSS_DIFFERENCE
    for mine, theirs in zip(run.grad_norms, stock.grad_norms, strict=True):
        assert abs(mine - theirs) <= MAX_RELATIVE_GRAD_NORM_DIFFERENCE * theirs


@pytest.mark.parametrize("name", CASES)
def test_follows_stock(name: str, corpus: Path) -> None:
    plan, more = CASES[name]
    flags = flags_for(corpus, *MASKED, "--clip-grad", "0.5", *more)
    stock = stock_of(flags)
    assert max(stock.grad_norms) > 0.5, "clipping must be at work in this test"
    assert_follows(plan, plan_run(plan, flags), stock, is_gated="--swiglu" in more)


def assert_same_bits(run: Recorded, other: Recorded) -> None:
    assert run.steps == other.steps
    for mine, theirs in zip(run.of_ranks, other.of_ranks, strict=True):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(weight, theirs[name]) for name, weight in mine.items())


def test_follows_stock_s_own_tensor_parallelism(corpus: Path, tmp_path: Path) -> None:
    """From the plan's initial weights, as each of stock's ranks draws with a seed of its own.

    A plan that names its equal parts runs as one that does not.
    """
    plan = plan_of(((set_of((0, 1), 2, 4),), 4))
    flags = flags_for(corpus, *MASKED, *DEGREE, "--clip-grad", "0.5")
    run = plan_run(plan, flags)
    named = Parts(kv_groups=(2, 2), mlp_columns=(64, 64), vocabulary_rows=(128, 128))
    assert_same_bits(plan_run(plan_of(((set_of((0, 1), 2, 4, parts=named),), 4)), flags), run)
    for rank in (0, 1):
        mine = {name: copies[rank] for name, copies in run.initial.items()}
        torch.save(mine, tmp_path / f"initial-rank{rank}.pt")
    stock = run_recorded(flags, 2, env={"ZORSE_TEST_INITIAL": str(tmp_path)})
    assert max(stock.grad_norms) > 0.5, "clipping must be at work in this test"
    assert_equal_steps(run, stock)
    for mine, theirs in zip(run.of_ranks, stock.of_ranks, strict=True):
        assert mine.keys() == theirs.keys()
        for name, expected in theirs.items():
            difference = (mine[name] - expected).norm() / expected.norm()
            assert difference <= MAX_RELATIVE_WEIGHT_DIFFERENCE, name


@pytest.mark.parametrize("plant", ["norm", "sum"])
def test_a_planted_mistake_is_seen(plant: str, corpus: Path) -> None:
    """A norm that counts on two ranks what a set holds whole, and a gradient summed twice."""
    plan = plan_of(((set_of((0, 1), 2, 4),), 4))
    flags = flags_for(corpus, *MASKED, "--clip-grad", "0.5", *SEQUENCE_PARALLEL)
    entry = "tests.megatron.planted_entry"
    run = plan_run(plan, flags, entry=entry, env={"ZORSE_TEST_PLANT": plant})
    with pytest.raises(AssertionError):
        assert_follows(plan, run, stock_of(flags))


def test_traffic_is_the_closed_form(corpus: Path, tmp_path: Path) -> None:
    """Of what is cut each element crosses once to be summed and once to be known.

    What the set of two holds whole is told to three ranks. An activation crosses once.
    """
    plan = plan_of((UNLIKE, 2), ((set_of((3, 4), 4, 2),), 2))
    save_plan(plan, tmp_path / "plan.json")
    flags = [*flags_for(corpus, *UNTIED, steps=3), "--zorse-plan", str(tmp_path / "plan.json")]
    entry, env = "tests.megatron.traffic_entry", {"ZORSE_TEST_RECORD": str(tmp_path)}
    run_ranks(flags, 5, entry=entry, timeout_s=120, env=env).check()
    found = [json.loads((tmp_path / f"traffic-rank{r}.json").read_text()) for r in range(5)]
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
