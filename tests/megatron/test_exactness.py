"""The first promise: under any plan, loss, gradient norm and weights follow stock Megatron's.

The reference is a stock single process of the same command. Tolerances are the project's: loss 2e-5
absolute, gradient norm 1e-4 relative, each parameter 1e-4 relative (norm-wise), in fp32: after 20
steps for a canonical plan with a tied embedding, and after two for all others. Initial weights are
stock's to the bit, and so are all copies.

What only moves memory, or work from one moment to another, is held to more: `CHANGES_NO_BIT`.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from tests.megatron import small_pieces
from tests.megatron.checkpoint_jobs import read_checkpoint
from tests.megatron.comparison import (
    DEGREE,
    LLAMA,
    MANY_STEPS,
    MASKED,
    MAX_LOSS_DIFFERENCE,
    MAX_RELATIVE_WEIGHT_DIFFERENCE,
    NO_CLIP,
    SEQUENCE_PARALLEL,
    STEPS,
    UNTIED,
    Recorded,
    assert_equal_steps,
    assert_follows,
    assert_same_bits,
    evaluations,
    flags_for,
    for_one_process,
    plan_run,
    run_recorded,
    stock_run,
)
from tests.megatron.launch import ONE_QUEUE
from tests.megatron.plans import (
    BOTH_ENDS,
    FIRST_LAYER,
    FULL,
    LAYERED,
    LAYOUTS,
    NEIGHBOURS,
    NONE,
    SELECTIVE,
    TRIO,
    TWO_BY_TWO,
    breadth_first,
    chunked_plan,
    computing_in,
    each_its_own,
    hierarchical,
    in_regions,
    in_the_host,
    offloading_gradients,
    plan_of,
    replica,
    split,
    tp_replica,
    with_settings,
)
from tests.megatron.preloaded import run_megatron_ranks
from zorse_megatron.plan.plan import (
    Halved,
    Plan,
    Schedule,
    TpShards,
    TransferTime,
)
from zorse_megatron.schedule.actions import Kind
from zorse_megatron.schedule.lower import lower_plan
from zorse_megatron.schedule.pipeline_schedules import RESIDENT, parameters_setting
from zorse_megatron.schedule.samples import rank_micro_batches
from zorse_megatron.schedule.transfer_windows import offloaded_gradients

CLIPPED = ("--clip-grad", "0.1", "--log-num-zeros-in-grad")
BUCKETS = ("--overlap-grad-reduce", "--ddp-num-buckets", "3")
EVALUATED = ("--eval-interval", "2", "--eval-iters", "2")
# From this loss scale the first step overflows in fp16 and is skipped; the next changes weights.
OVERFLOWING = (
    *("--bf16", "--initial-loss-scale", "16384", "--hysteresis", "1"),
    *("--lr-warmup-iters", "0"),
)
INTERLEAVED = with_settings(TWO_BY_TWO, schedule=Schedule(name="interleaved"))


@dataclass(frozen=True, kw_only=True)
class Row:
    """A plan, flags beyond those of all runs, and how its ranks are started."""

    plan: Plan
    flags: tuple[str, ...] = ()
    steps: int = STEPS
    entry: str = "recording_entry"
    env: Mapping[str, str] = field(default_factory=dict)

    def command(self, corpus: Path) -> tuple[str, ...]:
        always = (*MASKED, "--clip-grad", "0.5", "--log-params-norm")
        return flags_for(corpus, *always, *self.flags, steps=self.steps)


PIECES = {small_pieces.NAME: "1000"}
"""Pieces of optimizer state begin and end within parameters."""

UNLIKE = (tp_replica((0, 1), 2, 3, 2.0), replica(2, 1, 2, 1.0))
"""A TP group of two ranks beside one rank, of other micro-batches and shards."""
BESIDE_A_RANK = chunked_plan([UNLIKE, (replica(3, 4, 2),)], [(0, 1), (1, 1), (0, 1), (1, 1)])
ONE_SET = plan_of(((tp_replica((0, 1), 2, 4),), 4))


def with_times(plan: Plan) -> Plan:
    """Of unequal GPUs far from one another, with limits that make them wait."""
    groups = tuple(
        replace(
            group,
            replicas=tuple(
                replace(
                    each,
                    compute_s=((1.0 + number, 3.0 - index % 2, 1.0),)
                    * len(plan.chunks_of_group(number)),
                    max_in_flight=3 * each.micro_batch_size + number,
                    max_delayed_wgrad=each.micro_batch_size if group.split_backward else None,
                )
                for index, each in enumerate(group.replicas)
            ),
        )
        for number, group in enumerate(plan.groups)
    )
    chunks = tuple(
        chunk
        if after is None or after.group == chunk.group
        else replace(chunk, transfer=TransferTime(latency_s=0.5, s_per_sample=0.25))
        for chunk, after in zip(plan.chunks, (*plan.chunks[1:], None), strict=True)
    )
    return replace(plan, groups=groups, chunks=chunks)


def in_halves(plan: Plan) -> Plan:
    """The first micro-batch of each replica and the last one in two halves, odd sizes too."""
    groups = tuple(
        replace(
            group,
            replicas=tuple(
                replace(each, halved=Halved(first=1, last=int(each.num_microbatches > 1)))
                if each.micro_batch_size > 1
                else each
                for each in group.replicas
            ),
        )
        for group in plan.groups
    )
    assert any(each.halved for group in groups for each in group.replicas)
    return replace(plan, groups=groups)


SLOW_LINKS = with_times(LAYOUTS["2|1|2"])
SLOW_AND_APART = in_regions(SLOW_LINKS, "ew", "e", "we")
SWIGLU = (
    # A third of it is odd: stock halves that where it warms up its fused functions.
    *("--swiglu", "--ffn-hidden-size", "130", "--qk-layernorm"),
    *("--position-embedding-type", "rope"),
)
FOUR_GROUPS_OVER_THREE = Row(
    plan=with_settings(
        plan_of(
            (
                (
                    tp_replica(
                        *((0, 1, 2), 2, 4, 1.0),
                        TpShards(
                            kv_groups=(0, 3, 1),
                            mlp_columns=(0, 61, 69),
                            vocabulary_rows=(0, 156, 100),
                        ),
                    ),
                ),
                4,
            )
        ),
        SELECTIVE,
    ),
    flags=(*SWIGLU, *DEGREE),
)
"""A TP group of three ranks, of which one has no KV groups; the command says two."""

# A tied embedding is the harder one, whose gradients and copies two groups have: it is tied unless
# the flags say otherwise. Flags that do not touch one another come together.
ROWS: dict[str, Row] = {
    # Unequal micro-batches, shards, layers and token counts.
    "2|1, many steps": Row(plan=LAYOUTS["2|1"], steps=MANY_STEPS),
    "1|1|1|1, untied, overlap": Row(plan=LAYOUTS["1|1|1|1"], flags=(*UNTIED, *BUCKETS)),
    # The last rank, which prints, is not one that knows the loss.
    "1|3|1, ends inside, evaluated": Row(plan=LAYOUTS["1|3|1, ends inside"], flags=EVALUATED),
    "2|3, idle at the end, distributed optimizer, overlap": Row(
        plan=LAYOUTS["2|3, idle at the end"],
        flags=("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"),
    ),
    "slow messages between regions, other recomputation in each group and replica": Row(
        plan=each_its_own(
            with_settings(SLOW_AND_APART, FIRST_LAYER, SELECTIVE, NONE, optimizer_state=True)
        )
    ),
    # Several chunks: gathered and released, recomputed, offloaded.
    "interleaved by its times, each replica its own": Row(
        plan=with_times(each_its_own(INTERLEAVED))
    ),
    "in halves, slow messages, evaluated": Row(plan=in_halves(SLOW_LINKS), flags=EVALUATED),
    "in halves, interleaved by its times, each replica its own": Row(
        plan=in_halves(with_times(each_its_own(INTERLEAVED)))
    ),
    "in halves, a TP group over three ranks": Row(
        plan=in_halves(FOUR_GROUPS_OVER_THREE.plan), flags=FOUR_GROUPS_OVER_THREE.flags
    ),
    "in the host, evaluated": Row(plan=in_the_host(BOTH_ENDS), flags=EVALUATED),
    "in the host, layered": Row(plan=in_the_host(LAYERED), flags=CLIPPED, env=PIECES),
    "neighbouring chunks, full recomputation": Row(plan=with_settings(NEIGHBOURS, FULL)),
    "resident, no clip": Row(
        plan=with_settings(TWO_BY_TWO, schedule=breadth_first(parameters="resident")),
        flags=(*UNTIED, *NO_CLIP),
    ),
    # It multiplies by the clip coefficient where it steps, wherever the state comes from.
    "the fused update, in pieces": Row(
        plan=with_settings(BOTH_ENDS, optimizer_state=True),
        flags=("--zorse-update", "fused"),
        env=PIECES,
    ),
    # They count steps per group, in every call; with state in the host there are many calls.
    "state in the host of an optimizer as GPUs have": Row(
        plan=with_settings(TWO_BY_TWO, optimizer_state=True),
        flags=(*UNTIED, *NO_CLIP),
        entry="fused_entry",
    ),
    "two levels, an idle rank and one without a shard": Row(
        plan=hierarchical(
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
        )
    ),
    "two levels, three regions": Row(plan=hierarchical(TRIO, "abc")),
    # Tensor-parallel groups.
    "1|2+1, llama, cyclic, recompute, no clip, sequence parallel": Row(
        plan=plan_of(((replica(3, 4, 2),), 2), (UNLIKE, 2)),
        flags=(
            *(*LLAMA, *NO_CLIP, *SEQUENCE_PARALLEL, "--dataloader-type", "cyclic"),
            *("--recompute-granularity", "full", "--recompute-method", "uniform"),
            *("--recompute-num-layers", "1"),
        ),
    ),
    "2+2, overlap, sequence parallel, one TP group recomputes attention": Row(
        plan=plan_of(
            (
                (
                    replace(tp_replica((0, 1), 2, 3, 2.0), recompute=SELECTIVE),
                    tp_replica((2, 3), 1, 2),
                ),
                4,
            )
        ),
        flags=(*SEQUENCE_PARALLEL, *BUCKETS),
    ),
    "2+1 1, chunks in turn, in the host": Row(
        plan=with_settings(BESIDE_A_RANK, FULL, activations=True, optimizer_state=True),
        flags=UNTIED,
    ),
    # Unequal parts. Its gradients go to and come from a rank that holds everything; one of three
    # holds no layer.
    "3:1 beside 1, tied to a TP group of three": Row(
        plan=plan_of(
            (
                (
                    tp_replica(
                        *((0, 1), 2, 3, 2.0),
                        TpShards(kv_groups=(3, 1), mlp_columns=(96, 32), vocabulary_rows=(170, 86)),
                    ),
                    replica(2, 1, 2),
                ),
                2,
            ),
            (
                (
                    tp_replica(
                        *((3, 4, 5), 4, 2, 1.0),
                        TpShards(
                            kv_groups=(0, 3, 1),
                            mlp_columns=(0, 0, 128),
                            vocabulary_rows=(256, 0, 0),
                        ),
                    ),
                ),
                2,
            ),
        )
    ),
    # Every rank has its own norms' gradients of its own positions only.
    "all to none, sequence parallel": Row(
        plan=with_settings(
            plan_of(
                (
                    (
                        tp_replica(
                            *((0, 1), 2, 4, 2.0),
                            TpShards(
                                kv_groups=(4, 0), mlp_columns=(96, 32), vocabulary_rows=(0, 256)
                            ),
                        ),
                    ),
                    4,
                )
            ),
            FULL,
        ),
        flags=SEQUENCE_PARALLEL,
    ),
    # Not compared with a single process: with stock's own TP groups, or by what changes no bit.
    "a TP group of two": Row(plan=ONE_SET, flags=DEGREE),
    "layered, gradients in 16 bits": Row(
        plan=LAYERED, flags=(*UNTIED, *CLIPPED, "--bf16", "--grad-reduce-in-bf16"), env=PIECES
    ),
    "fp16 and bf16, resident": Row(
        plan=computing_in(
            with_settings(TWO_BY_TWO, schedule=breadth_first(parameters="resident")),
            *("fp16", "bf16"),
        ),
        flags=(*UNTIED, *NO_CLIP, *OVERFLOWING),
        steps=6,
    ),
    "layers as Transformer Engine's, fp16": Row(
        plan=INTERLEAVED, flags=("--fp16",), entry="engine_like_entry"
    ),
}
BASES_ALONE = (
    *("layered, gradients in 16 bits", "fp16 and bf16, resident"),
    *("layers as Transformer Engine's, fp16", "a TP group of two"),
)


@functools.cache
def run_of(name: str, corpus: Path) -> Recorded:
    """The run of a row, made once."""
    return started(ROWS[name], corpus)


def started(row: Row, corpus: Path, *more: str) -> Recorded:
    entry = f"tests.megatron.{row.entry}"
    return plan_run(row.plan, [*row.command(corpus), *more], entry=entry, env=row.env)


def stock_of(flags: tuple[str, ...]) -> Recorded:
    without = list(for_one_process(flags))
    if "--zorse-update" in without:
        at = without.index("--zorse-update")
        del without[at : at + 2]
    return stock_run(tuple(without))


@pytest.mark.parametrize("name", [name for name in ROWS if name not in BASES_ALONE])
def test_follows_stock(name: str, corpus: Path) -> None:
    row, run = ROWS[name], run_of(name, corpus)
    stock = stock_of(row.command(corpus))
    *_, clipped_at = (float(b) for a, b in pairwise(row.command(corpus)) if a == "--clip-grad")
    assert max(stock.grad_norms) > clipped_at, "clipping must be at work in this test"
    assert_follows(run, stock)
    if row.flags[-4:] == EVALUATED:
        expected = evaluations(stock)
        assert len(expected) == 3, "one during training, one each on the validation and test sets"
        assert evaluations(run) == pytest.approx(expected, abs=MAX_LOSS_DIFFERENCE)
    if "--zorse-update" in row.flags:
        assert "shards are updated in one pass each" in run.outputs[0]


def test_slow_messages_and_regions_change_what_runs_when_and_where() -> None:
    assert lower_plan(SLOW_LINKS) != lower_plan(LAYOUTS["2|1|2"])
    assert micro_batches_of(SLOW_AND_APART) != micro_batches_of(SLOW_LINKS)


def micro_batches_of(plan: Plan) -> set[tuple[int, int, int]]:
    """(rank, first sample, end)."""
    return {
        (rank, each.start, each.stop)
        for rank in range(plan.world_size)
        for each in rank_micro_batches(plan, rank)
    }


def changed(name: str, plan: Plan, **env: str) -> tuple[str, Row]:
    """A row under another plan."""
    row = ROWS[name]
    return name, replace(row, plan=plan, env={**row.env, **env})


def split_in(name: str) -> tuple[str, Row]:
    return changed(name, split(ROWS[name].plan))


def gradients_here(name: str) -> tuple[str, Row]:
    return changed(name, offloading_gradients(ROWS[name].plan, False))


# What is compared -> a row, and the same with something moved.
CHANGES_NO_BIT: dict[str, tuple[str, Row]] = {
    "parameters per micro-batch": changed(
        "resident, no clip",
        with_settings(
            TWO_BY_TWO, FIRST_LAYER, SELECTIVE, schedule=breadth_first(parameters="per_micro_batch")
        ),
    ),
    "each replica moves its own": changed(
        "resident, no clip", each_its_own(TWO_BY_TWO, parameters=True)
    ),
    "all in the host": changed("resident, no clip", in_the_host(TWO_BY_TWO), **PIECES),
    "a part of the state in the host": changed(
        "resident, no clip",
        with_settings(TWO_BY_TWO, optimizer_state=True, optimizer_state_fraction=0.4),
        **PIECES,
    ),
    # Steps that overflow are skipped alike.
    "all in the host, in two types": changed(
        "fp16 and bf16, resident",
        computing_in(in_the_host(TWO_BY_TWO), "fp16", "bf16"),
        **PIECES,
    ),
    "gradients that stay, clipped": gradients_here("in the host, layered"),
    # A step in parts makes fp32 copies of a part at a time, also where gradients stay.
    "gradients in 16 bits in the host": changed(
        "layered, gradients in 16 bits",
        with_settings(LAYERED, optimizer_state=True, gradients=True),
    ),
    "gradients in 16 bits, the state in the host": changed(
        "layered, gradients in 16 bits", with_settings(LAYERED, optimizer_state=True)
    ),
    "weight gradients, 1f1b": split_in("1|1|1|1, untied, overlap"),
    "weight gradients, in the host": split_in("in the host, evaluated"),
    "weight gradients, Transformer Engine's": split_in("layers as Transformer Engine's, fp16"),
    "weight gradients, sets": split_in(
        "1|2+1, llama, cyclic, recompute, no clip, sequence parallel"
    ),
    "weight gradients, a TP group in the host": split_in("2+1 1, chunks in turn, in the host"),
    "weight gradients, ranks that hold nothing": split_in(
        "3:1 beside 1, tied to a TP group of three"
    ),
    "equal parts by name": changed(
        "a TP group of two",
        plan_of(
            (
                (
                    tp_replica(
                        *((0, 1), 2, 4, 1.0),
                        TpShards(
                            kv_groups=(2, 2), mlp_columns=(64, 64), vocabulary_rows=(128, 128)
                        ),
                    ),
                ),
                4,
            )
        ),
    ),
}


@pytest.mark.parametrize("name", CHANGES_NO_BIT)
def test_changes_no_bit(name: str, corpus: Path) -> None:
    base, row = CHANGES_NO_BIT[name]
    if name.startswith("weight gradients"):
        assert any(waits(actions) for actions in lower_plan(row.plan).ranks)
    if name.startswith("gradients"):
        assert some_leave(row.plan), "the test needs gradients that are offloaded"
    run = started(row, corpus)
    assert_same_bits(run, run_of(base, corpus))
    if "--hysteresis" in row.flags:
        skipped = [step["skipped"] for step in run.steps]
        assert skipped[0] and sum(skipped) < len(skipped) - 1, "the test needs both"


def waits(actions) -> bool:
    """Whether a backward stands between another one and its weight gradients."""
    kinds = [a.kind for a in actions if a.kind in (Kind.BACKWARD, Kind.WEIGHT_GRADIENT)]
    return (Kind.BACKWARD, Kind.BACKWARD) in pairwise(kinds)


def some_leave(plan: Plan, *, tied: bool = False) -> bool:
    """Whether any gradients would wait in the host if all ranks offloaded theirs."""
    if parameters_setting(plan) == RESIDENT:
        return False
    lists = lower_plan(offloading_gradients(plan, True), tied=tied)
    return any(map(offloaded_gradients, lists.ranks))


def test_fused_cross_entropy_follows_stock_summing_over_tokens_too(corpus: Path) -> None:
    """Stock rounds the logits' gradients to bf16, after the factor of its mean over tokens.

    So stock itself differs with and without --calculate-per-token-loss, where the number of tokens
    is no power of two.
    """
    more = ("--cross-entropy-loss-fusion", "--seq-length", "24", *NO_CLIP)
    flags = flags_for(corpus, *UNTIED, *more, steps=5)
    run, reference = plan_run(LAYOUTS["2|1"], flags), stock_run(flags)
    assert_follows(run, reference)
    default = stock_run(tuple(flag for flag in flags if flag != "--calculate-per-token-loss"))
    assert norms_apart(default, reference) > 100 * norms_apart(run, reference)


def norms_apart(run: Recorded, other: Recorded) -> float:
    pairs = zip(run.grad_norms, other.grad_norms, strict=True)
    return max(abs(mine - theirs) / theirs for mine, theirs in pairs)


def test_follows_stock_s_own_tensor_parallelism(corpus: Path, tmp_path: Path) -> None:
    """From the plan's initial weights, as each of stock's ranks draws with a seed of its own."""
    run = run_of("a TP group of two", corpus)
    for rank in (0, 1):
        torch.save(run.initial[rank], tmp_path / f"initial-rank{rank}.pt")
    flags = ROWS["a TP group of two"].command(corpus)
    stock = run_recorded(flags, 2, env={"ZORSE_TEST_INITIAL": str(tmp_path), **ONE_QUEUE})
    assert max(stock.grad_norms) > 0.5, "clipping must be at work in this test"
    assert_equal_steps(run, stock)
    for mine, theirs in zip(run.of_ranks, stock.of_ranks, strict=True):
        assert mine.keys() == theirs.keys()
        for name, expected in theirs.items():
            difference = (mine[name] - expected).norm() / expected.norm()
            assert difference <= MAX_RELATIVE_WEIGHT_DIFFERENCE, name


@pytest.mark.parametrize("kinds", ["alike", "unlike"])
def test_unlike_gpus_start_from_the_same_weights(kinds: str, corpus: Path) -> None:
    """Tied embeddings, replicas and a TP group, whose ranks draw other numbers from one seed."""
    row = Row(
        plan=BESIDE_A_RANK,
        steps=2,
        entry="unlike_draws_entry",
        env={"ZORSE_TEST_KINDS": kinds},
    )
    run = started(row, corpus)
    assert "initial weights are sent by rank 0" in run.outputs[0]
    assert_follows(run, stock_of(row.command(corpus)))


@pytest.mark.parametrize("plant", ["norm", "sum"])
def test_a_planted_mistake_is_seen(plant: str, corpus: Path) -> None:
    """A norm that counts on two ranks what a TP group holds whole, and a gradient summed twice."""
    row = Row(
        plan=ONE_SET,
        flags=SEQUENCE_PARALLEL,
        steps=1,
        entry="planted_entry",
        env={"ZORSE_TEST_PLANT": plant},
    )
    run = started(row, corpus)
    with pytest.raises(AssertionError):
        assert_follows(run, stock_of(row.command(corpus)))


def test_follows_stock_into_the_checkpoint(corpus: Path, tmp_path: Path) -> None:
    """Of a gated MLP in uneven TP shards: parameters and optimizer."""
    row, every = FOUR_GROUPS_OVER_THREE, ("--save-interval", str(STEPS))
    run = started(row, corpus, "--save", str(tmp_path / "plan"), *every)
    stock = stock_of((*row.command(corpus), "--save", str(tmp_path / "stock"), *every))
    assert_follows(run, stock)
    (unlike,) = run_megatron_ranks(1, unlike_tensors, tmp_path / "plan", tmp_path / "stock")
    assert unlike == []


def unlike_tensors(mine: Path, stock: Path) -> list[str]:
    """What is in only one of two checkpoints, or of other shape or value in the two."""
    folder = f"iter_{STEPS:07d}"
    found, expected = (
        {k: v for k, v in read_checkpoint(root / folder)[0].items() if isinstance(v, torch.Tensor)}
        for root in (mine, stock)
    )
    assert sum(key.startswith("optimizer.state.exp_avg_sq.") for key in expected) > 10
    most = MAX_RELATIVE_WEIGHT_DIFFERENCE
    return [
        key
        for key in sorted(found.keys() | expected.keys())
        if key not in found
        or key not in expected
        or found[key].shape != expected[key].shape
        or not (found[key] - expected[key]).norm() <= most * expected[key].norm()
    ]
