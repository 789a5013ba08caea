"""The first promise: under any plan, loss, gradient norm and weights follow stock Megatron's.

The reference is a stock single-process run of the same command. Tolerances are the project's:
loss 2e-5 absolute, gradient norm 1e-4 relative, each parameter 1e-4 relative (norm-wise), in fp32:
after 20 steps for canonical plans with a tied embedding, and after three, in which the learning
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
from zorse_megatron.schedules.lower import lower_plan
from zorse_megatron.schema.plan.plan import Hop, Plan

MAX_LOSS_DIFFERENCE = 2e-5
MAX_RELATIVE_GRAD_NORM_DIFFERENCE = 1e-4
MAX_RELATIVE_WEIGHT_DIFFERENCE = 1e-4

UNTIED = ("--untie-embeddings-and-output-weights",)
NO_CLIP = ("--clip-grad", "0")
MASKED = ("--eod-mask-loss",)
CANONICAL = ("2|1|2", "4")
# A tied embedding is the harder one, whose gradients and copies two groups have; random plans are
# of both kinds.
UNTIED_LAYOUTS = ("2|1|2", "4", "1|3|1, ends inside")


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
    """Every rank's copy of every parameter; a tied head is the embedding."""
    assert set(reference) <= set(copies)
    for name, found in copies.items():
        expected = reference.get(name, reference["embedding.word_embeddings.weight"])[0].double()
        for copy in found:
            difference = (copy.double() - expected).norm() / expected.norm()
            assert difference <= MAX_RELATIVE_WEIGHT_DIFFERENCE, f"{name}: {difference}"
        assert all(torch.equal(copy, found[0]) for copy in found), f"copies of {name} differ"


@pytest.mark.parametrize(
    ("layout", "tied"),
    [*((layout, True) for layout in LAYOUTS), *((layout, False) for layout in UNTIED_LAYOUTS)],
)
def test_follows_stock(layout: str, tied: bool, corpus: Path) -> None:
    """Unequal micro-batches, shards, layers and token counts, with clipping at work."""
    steps = MANY_STEPS if tied and layout in CANONICAL else STEPS
    more = () if tied else UNTIED
    flags = flags_for(corpus, *more, *MASKED, "--clip-grad", "0.5", steps=steps)
    reference = stock_run(flags)
    assert max(reference.grad_norms) > 0.5, "clipping must be at work in this test"
    run = plan_run(LAYOUTS[layout], flags)
    assert_equal_runs(run, reference)
    if tied and len(LAYOUTS[layout].chunks) > 1:
        assert_tied_copies_are_equal(run)


def assert_tied_copies_are_equal(run: Recorded) -> None:
    embedding, *others = [
        *run.final["embedding.word_embeddings.weight"],
        *run.final["output_layer.weight"],
    ]
    assert others and all(torch.equal(copy, embedding) for copy in others)


OTHER_FLAGS = {
    "no clip": ("--clip-grad", "0"),
    "overlap": ("--clip-grad", "0.5", "--overlap-grad-reduce", "--ddp-num-buckets", "3"),
    "distributed optimizer":
        ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"),
    "llama":
        ("--swiglu", "--disable-bias-linear", "--position-embedding-type", "rope",
         "--normalization", "RMSNorm", "--group-query-attention", "--num-query-groups", "2"),
    "cyclic": ("--dataloader-type", "cyclic"),
    "recompute":
        ("--recompute-granularity", "full", "--recompute-method", "uniform",
         "--recompute-num-layers", "1"),
}  # fmt: skip
# The last two layouts have a rank without work or without a shard, which matters where gradients
# are reduced and norms are taken.
OTHER_CASES = [
    *(("2|1|2", name) for name in OTHER_FLAGS),
    *(("5, one idle", name) for name in ("no clip", "overlap", "distributed optimizer")),
    *(("3|2", name) for name in ("overlap", "distributed optimizer")),
]


@pytest.mark.parametrize(("layout", "name"), OTHER_CASES)
def test_follows_stock_with_other_flags(layout: str, name: str, corpus: Path) -> None:
    flags = flags_for(corpus, *MASKED, *OTHER_FLAGS[name])
    needs_parallel = ("--overlap-grad-reduce", "--overlap-param-gather")
    alone = tuple(f for f in flags if f not in (*needs_parallel, "--use-distributed-optimizer"))
    assert_equal_runs(plan_run(LAYOUTS[layout], flags), stock_run(alone))


@settings(
    max_examples=8,
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
    run, reference = plan_run(LAYOUTS["2|1|2"], flags), stock_run(flags)
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


@pytest.mark.parametrize("layout", ["1|2", "1|1|1|1", "4"])
def test_initial_weights_do_not_depend_on_the_plan(layout: str, corpus: Path) -> None:
    """Bit for bit those of a stock single process, on every rank that holds a copy."""
    flags = flags_for(corpus, *UNTIED, steps=1)
    reference = stock_run(flags).initial
    found = plan_run(LAYOUTS[layout], flags).initial
    assert set(found) == set(reference)
    for name, copies in found.items():
        assert all(torch.equal(copy, reference[name][0]) for copy in copies), name


@pytest.mark.parametrize("layout", ["2|1|2", "1|3|1, ends inside"])
def test_evaluation_follows_stock(layout: str, corpus: Path) -> None:
    """In the second layout the last rank, which prints, is not one that knows the loss."""
    flags = flags_for(corpus, *MASKED, "--eval-interval", "2", "--eval-iters", "3", steps=4)
    expected = evaluations(stock_run(flags).outputs)
    assert len(expected) == 4, "two during training, one each on the validation and test sets"
    run = plan_run(LAYOUTS[layout], flags)
    assert evaluations(run.outputs) == pytest.approx(expected, abs=MAX_LOSS_DIFFERENCE)


def evaluations(outputs: Sequence[str]) -> list[float]:
    """The losses of all evaluations, as the job's last rank prints them."""
    return [float(v) for v in re.findall(r"lm loss value: (\S+)", outputs[-1])]


def test_two_runs_of_a_plan_are_equal_bit_for_bit(corpus: Path) -> None:
    flags = flags_for(corpus, *MASKED)
    first, second = (plan_run(LAYOUTS["2|1|2"], flags) for _ in range(2))
    assert first.losses == second.losses
    for name, copies in first.final.items():
        assert torch.equal(copies[0], second.final[name][0]), name
