"""The first promise: under any plan, loss, gradient norm and weights follow stock Megatron's.

The reference is a stock single-process run of the same command. Tolerances are the project's:
loss 2e-5 absolute, gradient norm 1e-4 relative, each parameter 1e-4 relative (norm-wise), in fp32:
after 20 steps for a canonical plan with a tied embedding, and after three, in which the learning
rate rises and falls, for all others.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.megatron.comparison import (
    BASE_FLAGS,
    GLOBAL_BATCH_SIZE,
    LAYOUTS,
    MANY_STEPS,
    NUM_LAYERS,
    STEPS,
    Recorded,
    plan_run,
    stock_run,
)
from tests.megatron.small_run import TOKENIZER_FLAGS
from tests.strategies import plans
from zorse_megatron.plan.plan import Hop, Plan
from zorse_megatron.schedule.lower import lower_plan
from zorse_megatron.schedule.samples import replica_micro_batches

MAX_LOSS_DIFFERENCE = 2e-5
MAX_RELATIVE_GRAD_NORM_DIFFERENCE = 1e-4
MAX_RELATIVE_WEIGHT_DIFFERENCE = 1e-4

UNTIED = ("--untie-embeddings-and-output-weights",)
NO_CLIP = ("--clip-grad", "0")
MASKED = ("--eod-mask-loss",)
CANONICAL = "2|1"
# A tied embedding is the harder one, whose gradients and copies two groups have; random plans are
# of both kinds.
FOLLOWING = (
    *((name, True) for name in (CANONICAL, "1|1|1|1", "4", "1|3|1, ends inside")),
    ("2|3, idle at the end", True),
    *((name, False) for name in ("1|2", "1|3|1, ends inside")),
)


def flags_for(corpus: Path, *more: str, steps: int = STEPS) -> tuple[str, ...]:
    return (
        *BASE_FLAGS,
        *("--train-iters", str(steps), "--data-path", str(corpus), "--split", "90,5,5"),
        *TOKENIZER_FLAGS,
        *more,
    )


def assert_equal_runs(run: Recorded, reference: Recorded) -> None:
    assert len(run.losses) == len(reference.losses) > 0
    for step, (mine, stock) in enumerate(zip(run.losses, reference.losses, strict=True), start=1):
        assert abs(mine - stock) <= MAX_LOSS_DIFFERENCE, f"loss of step {step}: {mine} != {stock}"
    for step, (mine, stock) in enumerate(
        zip(run.grad_norms, reference.grad_norms, strict=True), start=1
    ):
        assert abs(mine - stock) <= MAX_RELATIVE_GRAD_NORM_DIFFERENCE * stock, (
            f"gradient norm of step {step}: {mine} != {stock}"
        )
    assert_equal_weights(run.final, reference.final)


def assert_equal_weights(
    copies: dict[str, list[torch.Tensor]], reference: dict[str, list[torch.Tensor]]
) -> None:
    assert set(reference) <= set(copies)
    for name, found in copies.items():
        expected = of_reference(name, reference).double()
        for copy in found:
            difference = (copy.double() - expected).norm() / expected.norm()
            assert difference <= MAX_RELATIVE_WEIGHT_DIFFERENCE, f"{name}: {difference}"
        assert all(torch.equal(copy, found[0]) for copy in found), f"copies of {name} differ"


def of_reference(name: str, reference: dict[str, list[torch.Tensor]]) -> torch.Tensor:
    """A tied head is the embedding."""
    return reference.get(name, reference["embedding.word_embeddings.weight"])[0]


@pytest.mark.parametrize(("layout", "tied"), FOLLOWING)
def test_follows_stock(layout: str, tied: bool, corpus: Path) -> None:
    """Unequal micro-batches, shards, layers and token counts, with clipping at work.

    Initial weights are those of stock bit for bit, on every rank that holds a copy.
    """
    steps = MANY_STEPS if tied and layout == CANONICAL else STEPS
    more = () if tied else UNTIED
    flags = flags_for(corpus, *more, *MASKED, "--clip-grad", "0.5", steps=steps)
    reference = stock_run(flags)
    assert max(reference.grad_norms) > 0.5, "clipping must be at work in this test"
    run = plan_run(LAYOUTS[layout], flags)
    assert set(reference.initial) <= set(run.initial)
    for name, copies in run.initial.items():
        expected = of_reference(name, reference.initial)
        assert all(torch.equal(copy, expected) for copy in copies), name
    assert_equal_runs(run, reference)
    if tied and len(LAYOUTS[layout].chunks) > 1:
        assert_tied_copies_are_equal(run)


def assert_tied_copies_are_equal(run: Recorded) -> None:
    embedding, *others = [
        *run.final["embedding.word_embeddings.weight"],
        *run.final["output_layer.weight"],
    ]
    assert others and all(torch.equal(copy, embedding) for copy in others)


# Flags that do not touch one another come together: who treats one of them wrongly is seen. The
# last two layouts have a rank without work or without a shard, which matters where gradients are
# reduced and norms are taken.
OTHER_FLAGS = {
    "llama, cyclic, recompute, no clip": (
        "2|1|2",
        ("--swiglu", "--disable-bias-linear", "--position-embedding-type", "rope",
         "--normalization", "RMSNorm", "--group-query-attention", "--num-query-groups", "2",
         "--dataloader-type", "cyclic", "--recompute-granularity", "full", "--recompute-method",
         "uniform", "--recompute-num-layers", "1", *NO_CLIP),
    ),
    "distributed optimizer, overlap": (
        "3|2",
        ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"),
    ),
    "overlap in three buckets": (
        "5, one idle",
        ("--clip-grad", "0.5", "--overlap-grad-reduce", "--ddp-num-buckets", "3"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHER_FLAGS)
def test_follows_stock_with_other_flags(name: str, corpus: Path) -> None:
    layout, more = OTHER_FLAGS[name]
    flags = flags_for(corpus, *MASKED, *more)
    needs_parallel = ("--overlap-grad-reduce", "--overlap-param-gather")
    alone = tuple(f for f in flags if f not in (*needs_parallel, "--use-distributed-optimizer"))
    assert_equal_runs(plan_run(LAYOUTS[layout], flags), stock_run(alone))


@settings(
    max_examples=examples(6),
    deadline=None,
    # A failing plan is small enough to read; shrinking it would take an hour.
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
    suppress_health_check=list(HealthCheck),
)
@given(
    plan=plans(
        max_world=5, max_groups=3, num_layers=NUM_LAYERS, global_batch_size=GLOBAL_BATCH_SIZE
    ),
    tied=st.booleans(),
)
def test_any_plan_follows_stock(plan: Plan, tied: bool, corpus: Path) -> None:
    more = () if tied else UNTIED
    flags = flags_for(corpus, *more, *MASKED, "--clip-grad", "0.5")
    assert_equal_runs(plan_run(plan, flags), stock_run(flags))


def test_fused_cross_entropy_follows_stock_summing_over_tokens_too(corpus: Path) -> None:
    """Stock rounds the logits' gradients to bf16, after the factor of its mean over tokens.

    So stock itself differs with and without --calculate-per-token-loss, where the number of tokens
    is no power of two.
    """
    more = ("--cross-entropy-loss-fusion", "--seq-length", "24", *NO_CLIP)
    flags = flags_for(corpus, *UNTIED, *more, steps=5)
    run, reference = plan_run(LAYOUTS["2|1"], flags), stock_run(flags)
    assert_equal_runs(run, reference)
    default = stock_run(tuple(flag for flag in flags if flag != "--calculate-per-token-loss"))
    assert norms_apart(default, reference) > 100 * norms_apart(run, reference)


def norms_apart(run: Recorded, other: Recorded) -> float:
    pairs = zip(run.grad_norms, other.grad_norms, strict=True)
    return max(abs(mine - theirs) / theirs for mine, theirs in pairs)


def test_slow_messages_change_the_order_alone(corpus: Path) -> None:
    plan = LAYOUTS["2|1|2"]
    hops = (Hop(latency=0.2, load=0.5), Hop(latency=0.1, load=1.5), None)
    chunks = tuple(replace(chunk, hop=hop) for chunk, hop in zip(plan.chunks, hops, strict=True))
    slow = replace(plan, chunks=chunks)
    assert lower_plan(slow) != lower_plan(plan)
    flags = flags_for(corpus, *MASKED, "--clip-grad", "0.5")
    assert_equal_runs(plan_run(slow, flags), stock_run(flags))


def test_regions_change_which_rank_runs_a_sample_alone(corpus: Path) -> None:
    plan = LAYOUTS["3|2"]
    regions = (("east", "west", "east"), ("west", "east"))
    apart = replace(
        plan,
        groups=tuple(
            replace(
                group,
                replicas=tuple(
                    replace(each, region=region)
                    for each, region in zip(group.replicas, row, strict=True)
                ),
            )
            for group, row in zip(plan.groups, regions, strict=True)
        ),
    )
    assert micro_batches_of(apart) != micro_batches_of(plan)
    flags = flags_for(corpus, *MASKED, "--clip-grad", "0.5")
    assert_equal_runs(plan_run(apart, flags), stock_run(flags))


def micro_batches_of(plan: Plan) -> set[tuple[int, int, int]]:
    """(rank, first sample, end)."""
    return {
        (rank, each.start, each.stop)
        for rank in range(plan.world_size)
        for each in replica_micro_batches(plan, rank)
    }


def test_evaluation_follows_stock(corpus: Path) -> None:
    """The last rank, which prints, is not one that knows the loss."""
    flags = flags_for(corpus, *MASKED, "--eval-interval", "2", "--eval-iters", "2")
    expected = evaluations(stock_run(flags).outputs)
    assert len(expected) == 3, "one during training, one each on the validation and test sets"
    run = plan_run(LAYOUTS["1|3|1, ends inside"], flags)
    assert evaluations(run.outputs) == pytest.approx(expected, abs=MAX_LOSS_DIFFERENCE)


def evaluations(outputs: Sequence[str]) -> list[float]:
    """The losses of all evaluations, as the job's last rank prints them."""
    return [float(v) for v in re.findall(r"lm loss value: (\S+)", outputs[-1])]
