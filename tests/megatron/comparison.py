"""Runs of stock Megatron and of plans on the same command, and how far they are apart.

The command is NVIDIA's own `pretrain_gpt.py` where that is there, else the built-in entry.
"""

import json
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from tests.megatron.launch import run_ranks
from tests.megatron.small_run import TOKENIZER_FLAGS
from tests.megatron.upstream import SCRIPT
from tests.shared import once_per_run
from zorse_megatron.flags.table import WITHOUT_DROPOUT, WITHOUT_EVALUATION, WITHOUT_WORKERS
from zorse_megatron.plan.plan import ModelFingerprint, Plan, Replica, TpShards
from zorse_megatron.plan.plan_file import save_plan
from zorse_megatron.schedule.actions import from_norm, parse_action
from zorse_megatron.trace import Span

NUM_LAYERS = 4
GLOBAL_BATCH_SIZE = 8
STEPS = 2
MANY_STEPS = 20
"""For a canonical plan: rounding would have added up by then, if it did."""

MODEL_FLAGS = (
    *("--num-layers", str(NUM_LAYERS), "--hidden-size", "32", "--num-attention-heads", "4"),
    *("--seq-length", "32", "--max-position-embeddings", "32"),
    *("--micro-batch-size", "1", "--global-batch-size", str(GLOBAL_BATCH_SIZE)),
    *("--lr", "1e-3", "--min-lr", "1e-4", "--lr-warmup-iters", "2", "--lr-decay-iters", "40"),
    *("--weight-decay", "0.1", *WITHOUT_DROPOUT, "--log-interval", "1", "--seed", "11"),
    *("--distributed-timeout-minutes", "1", "--calculate-per-token-loss"),
)
BASE_FLAGS = (*MODEL_FLAGS, *WITHOUT_EVALUATION, *WITHOUT_WORKERS)
UNTIED = ("--untie-embeddings-and-output-weights",)
NO_CLIP = ("--clip-grad", "0")
MASKED = ("--eod-mask-loss",)
SEQUENCE_PARALLEL = ("--sequence-parallel",)
SGD = ("--optimizer", "sgd", "--lr", "0.3")
MUON = ("--optimizer", "muon", "--lr", "0.01", "--muon-fp32-matmul-prec", "high")
DEGREE = ("--tensor-model-parallel-size", "2")
LLAMA = (
    *("--swiglu", "--disable-bias-linear", "--position-embedding-type", "rope"),
    *("--normalization", "RMSNorm", "--group-query-attention", "--num-query-groups", "2"),
)
EXPERTS = (
    *("--num-experts", "4", "--moe-router-topk", "2", "--moe-ffn-hidden-size", "48"),
    *("--moe-router-dtype", "fp64"),
)
LATENT = (
    *("--swiglu", "--disable-bias-linear", "--position-embedding-type", "rope"),
    *("--normalization", "RMSNorm", "--multi-latent-attention", "--kv-lora-rank", "16"),
    *("--qk-head-dim", "8", "--qk-pos-emb-head-dim", "8", "--v-head-dim", "12", "--no-rope-fusion"),
)
BALANCED = ("--moe-router-load-balancing-type", "aux_loss", "--moe-aux-loss-coeff", "0.02")
BIASED = (
    *("--moe-router-load-balancing-type", "none", "--moe-router-score-function", "sigmoid"),
    *("--moe-router-enable-expert-bias", "--moe-router-bias-update-rate", "0.02"),
)
OF_EACH = (
    *("--moe-router-load-balancing-type", "seq_aux_loss", "--moe-aux-loss-coeff", "0.5"),
    *("--moe-router-score-function", "sigmoid", "--moe-router-enable-expert-bias"),
    *("--moe-router-bias-update-rate", "0.02"),
)
FOR_SEVERAL = (
    *("--overlap-grad-reduce", "--overlap-param-gather", "--use-distributed-optimizer"),
    *SEQUENCE_PARALLEL,
)
"""What a single process cannot have."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """Flags of a model beyond those of all runs, and its sizes."""

    flags: tuple[str, ...]
    num_query_groups: int | None = 4
    ffn_hidden_size: int = 128
    vocab_size: int = 256
    num_experts: int | None = None
    moe_layer_freq: tuple[Literal[0, 1], ...] | None = None
    in_tp_groups: bool = True
    """Whether ranks may divide its layers, not only share their experts."""

    @property
    def sizes(self) -> ModelFingerprint:
        return ModelFingerprint(
            num_layers=NUM_LAYERS,
            num_query_groups=self.num_query_groups,
            ffn_hidden_size=self.ffn_hidden_size,
            vocab_size=self.vocab_size,
            num_experts=self.num_experts,
            moe_layer_freq=self.moe_layer_freq,
        )


ODD_VOCABULARY = ("--vocab-size", "257", "--make-vocab-size-divisible-by", "1")
MODELS = (
    Model(flags=()),
    Model(
        flags=(
            *("--hidden-size", "33", "--kv-channels", "8", "--ffn-hidden-size", "67"),
            *(*UNTIED, *ODD_VOCABULARY, *SGD),
        ),
        ffn_hidden_size=67,
        vocab_size=257,
    ),
    # Half and a third of the columns are odd; stock itself has no gated MLP of odd width.
    Model(
        flags=(*LLAMA, "--ffn-hidden-size", "130", *ODD_VOCABULARY),
        num_query_groups=2,
        ffn_hidden_size=130,
        vocab_size=257,
    ),
    Model(
        flags=(*LLAMA, *EXPERTS, *BALANCED, "--moe-z-loss-coeff", "0.01"),
        num_query_groups=2,
        ffn_hidden_size=64,
        num_experts=4,
    ),
    Model(
        flags=(*LLAMA, *EXPERTS, *OF_EACH, *UNTIED, "--moe-layer-freq", "([0]+[1]*3)"),
        num_query_groups=2,
        ffn_hidden_size=64,
        num_experts=4,
        moe_layer_freq=(0, 1, 1, 1),
    ),
    Model(
        flags=(
            *(*LATENT, *EXPERTS, *BIASED, "--q-lora-rank", "24"),
            *("--moe-shared-expert-intermediate-size", "40", "--moe-shared-expert-gate"),
        ),
        num_query_groups=None,
        ffn_hidden_size=64,
        num_experts=4,
        in_tp_groups=False,
    ),
)

MAX_LOSS_DIFFERENCE = 2e-5
MAX_RELATIVE_GRAD_NORM_DIFFERENCE = 1e-4
MAX_RELATIVE_WEIGHT_DIFFERENCE = 1e-4


def flags_for(corpus: Path, *more: str, steps: int = STEPS) -> tuple[str, ...]:
    """The command: text, and `more`."""
    return (
        *BASE_FLAGS,
        *("--train-iters", str(steps), "--data-path", str(corpus), "--split", "90,5,5"),
        *TOKENIZER_FLAGS,
        *more,
    )


def for_one_process(flags: Sequence[str]) -> tuple[str, ...]:
    """The command of the single process that does the same."""
    without = [flag for flag in flags if flag not in FOR_SEVERAL]
    if DEGREE[0] in without:
        at = without.index(DEGREE[0])
        del without[at : at + len(DEGREE)]
    return tuple(without)


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """What one run computed."""

    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]
    steps: tuple[dict[str, Any], ...]
    plan: Plan | None
    flags: tuple[str, ...]
    initial: tuple[dict[str, torch.Tensor], ...]
    """Rank -> its own parameters before the first step, by their names in the whole model."""
    final: dict[str, list[torch.Tensor]]
    """Name in the whole model -> the copies that ranks hold."""
    of_ranks: tuple[dict[str, torch.Tensor], ...]
    """Rank -> its own parameters after the last step."""
    outputs: tuple[str, ...]
    num_close_choices: int
    """Tokens whose experts could be others by rounding, see `recording_entry`."""
    smallest_gap: float | None
    """Between the scores of an expert that was chosen and of one that was not."""
    choices: tuple[torch.Tensor, ...] = ()
    """Experts of all tokens, [tokens, experts] of each time that rank 0 has routed some."""


def run_recorded(
    flags: Sequence[str],
    world_size: int,
    *,
    timeout_s: float = 120,
    entry: str = "tests.megatron.recording_entry",
    script: Sequence[str] = SCRIPT,
    env: Mapping[str, str] | None = None,
    plan: Plan | None = None,
) -> Recorded:
    """Run `zorse_megatron.pretrain` with `flags` and read what it recorded."""
    with tempfile.TemporaryDirectory() as scratch:
        record = Path(scratch, "record")
        result = run_ranks(
            [*script, *flags],
            world_size,
            entry=entry,
            timeout_s=timeout_s,
            env={"ZORSE_TEST_RECORD": str(record), **(env or {})},
        ).check()
        steps = json.loads((record / f"steps-rank{world_size - 1}.json").read_text())
        path, gap = record / "choices-rank0.pt", record / "gap-rank0.json"
        return Recorded(
            losses=tuple(step["loss"].get("lm loss", float("nan")) for step in steps),
            grad_norms=tuple(step["grad_norm"] for step in steps),
            steps=tuple(steps),
            plan=plan,
            flags=tuple(flags),
            initial=_of_ranks(record, "initial", world_size),
            final=_copies(of_ranks := _of_ranks(record, "weights", world_size)),
            of_ranks=of_ranks,
            outputs=result.outputs,
            num_close_choices=sum(
                sum(json.loads(path.read_text())) for path in record.glob("close-rank*.json")
            ),
            smallest_gap=json.loads(gap.read_text()) if gap.exists() else None,
            choices=tuple(torch.load(path)) if path.exists() else (),
        )


def _of_ranks(record: Path, kind: str, world_size: int) -> tuple[dict[str, torch.Tensor], ...]:
    return tuple(torch.load(record / f"{kind}-rank{rank}.pt") for rank in range(world_size))


def _copies(of_ranks: Sequence[dict[str, torch.Tensor]]) -> dict[str, list[torch.Tensor]]:
    copies: dict[str, list[torch.Tensor]] = {}
    for weights in of_ranks:
        for name, value in weights.items():
            copies.setdefault(name, []).append(value)
    return copies


@once_per_run
def stock_run(flags: tuple[str, ...], world_size: int = 1, **options: Any) -> Recorded:
    """A stock run of the command; one for each command in a run of the tests."""
    return run_recorded(flags, world_size, **options)


def plan_run(plan: Plan, flags: Sequence[str], **options: Any) -> Recorded:
    """A run of the command under a plan."""
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch, "plan.json")
        save_plan(plan, path)
        words = [*flags, "--zorse-plan", str(path)]
        return run_recorded(words, plan.world_size, plan=plan, **options)


def run_from_norm(spans: Sequence[Span], step: int) -> list[str]:
    """Actions that were run in a step, in the order in which the simulator has an iteration."""
    actions = [parse_action(span.action) for span in spans if span.step == step]
    return [str(action) for action in from_norm(actions)]


def assert_follows(run: Recorded, stock: Recorded) -> None:
    """Losses, norms, weights and their initial values are those of a stock single process.

    `pytest -rP` shows how far they are apart at most.
    """
    assert_equal_steps(run, stock)
    (initial,) = stock.initial
    assert largest_difference(run, run.initial, initial) == 0.0
    (final,) = stock.of_ranks
    weights = largest_difference(run, run.of_ranks, final)
    losses = max(abs(mine - its) for mine, its in zip(run.losses, stock.losses, strict=True))
    norms = max(abs(a / b - 1) for a, b in zip(run.grad_norms, stock.grad_norms, strict=True))
    print(f"apart at most: losses {losses:.0e}, norms {norms:.0e}, weights {weights:.0e}")
    assert weights <= MAX_RELATIVE_WEIGHT_DIFFERENCE


def assert_equal_steps(run: Recorded, stock: Recorded) -> None:
    assert len(run.losses) == len(stock.losses) > 0
    for step, (mine, its) in enumerate(zip(run.losses, stock.losses, strict=True), start=1):
        assert abs(mine - its) <= MAX_LOSS_DIFFERENCE, f"loss of step {step}: {mine} != {its}"
    for step, (mine, its) in enumerate(zip(run.grad_norms, stock.grad_norms, strict=True), start=1):
        assert abs(mine - its) <= MAX_RELATIVE_GRAD_NORM_DIFFERENCE * its, (
            f"gradient norm of step {step}: {mine} != {its}"
        )
    norms, expected = ([step["params_norm"] for step in each.steps] for each in (run, stock))
    assert norms == [its and pytest.approx(its, rel=1e-6) for its in expected]


EMBEDDING = "embedding.word_embeddings.weight"


def largest_difference(
    run: Recorded, of_ranks: Sequence[dict[str, torch.Tensor]], whole: Mapping[str, torch.Tensor]
) -> float:
    """Relative, of any rank's parameters from its parts of `whole`. A tied head is the embedding.

    Also asserts that ranks hold all of the model, and that holders of one part have the same bits.
    """
    assert run.plan is not None
    assert set(whole) <= {name for weights in of_ranks for name in weights}
    worst, held = 0.0, dict[tuple[str, bytes], torch.Tensor]()
    for rank, weights in enumerate(of_ranks):
        group, number = run.plan.replica_of_rank(rank)
        replica = run.plan.groups[group].replicas[number]
        for name, found in weights.items():
            source = name if name in whole else EMBEDDING
            expected = expected_part(
                source,
                whole[source],
                replica,
                index=replica.ranks.index(rank),
                is_gated="--swiglu" in run.flags,
            )
            assert found.shape == expected.shape, name
            difference = (found.double() - expected.double()).norm()
            worst = max(worst, float(difference / max(expected.double().norm(), 1e-30)))
            assert difference.isfinite(), name
            same = held.setdefault((source, expected.numpy().tobytes()), found)
            assert torch.equal(same, found), f"copies of {name} differ"
    return worst


_ROWS = ("linear_qkv.", "linear_fc1.", "word_embeddings.", "output_layer.")
_ROWS += tuple(f"lora.{target}.b" for target in ("q", "k", "v", "gate", "up"))
_COLUMNS = ("linear_proj.weight", "linear_fc2.weight", "lora.o.a", "lora.down.a")


def cut(whole: torch.Tensor, counts: tuple[int, ...], index: int, dim: int = 0) -> torch.Tensor:
    """The part of an axis in proportion to `counts`."""
    length, total = whole.shape[dim], sum(counts)
    return whole.narrow(dim, length * sum(counts[:index]) // total, length * counts[index] // total)


def expected_part(
    name: str, whole: torch.Tensor, replica: Replica, *, index: int, is_gated: bool
) -> torch.Tensor:
    """What rank `index` of a replica holds of a whole weight.

    By hand, from how Megatron's layers are documented to divide their weights.
    """
    shared, tp_shards = replica.expert_parallel, replica.tp_shards or TpShards()
    experts = tp_shards.experts if shared is None else shared.experts
    if experts is not None and ".local_experts." in name:
        return expert_part(name, whole, experts, index=index)
    if shared is not None:
        return whole
    kind = tp_shards.mlp_columns if "mlp." in name else tp_shards.vocabulary_rows
    counts = (tp_shards.kv_groups if "self_attention." in name else kind) or (1,) * len(
        replica.ranks
    )
    if is_gated and "linear_fc1." in name:
        return torch.cat([cut(half, counts, index) for half in whole.chunk(2)])
    if any(each in name for each in _ROWS):
        return cut(whole, counts, index)
    if name.endswith(_COLUMNS):
        return cut(whole, counts, index, dim=1)
    return whole


def expert_part(
    name: str, whole: torch.Tensor, experts: tuple[int, ...], *, index: int
) -> torch.Tensor:
    """All of an expert's weight on its owner, nothing on others."""
    expert = int(name.split(".local_experts.")[1].split(".", maxsplit=1)[0])
    owners = [rank for rank, number in enumerate(experts) for _ in range(number)]
    if owners[expert] == index:
        return whole
    return whole[:0] if "linear_fc1." in name else whole[:, :0]


def assert_same_bits(run: Recorded, other: Recorded) -> None:
    """Steps and weights of two runs of the same ranks.

    Norms to rounding, as they are sums by shard: where gradients are clipped, weights show them.
    """
    assert len(run.steps) == len(other.steps) > 0
    for mine, its in zip(run.steps, other.steps, strict=True):
        for name in ("grad_norm", "params_norm"):
            assert mine[name] == (its[name] and pytest.approx(its[name], rel=1e-6))
        assert mine | {name: its[name] for name in ("grad_norm", "params_norm")} == its
    for mine, its in zip(run.of_ranks, other.of_ranks, strict=True):
        assert mine.keys() == its.keys()
        for name, weight in mine.items():
            assert torch.equal(weight, its[name]), name


def evaluations(run: Recorded) -> list[float]:
    """The losses of all evaluations, as the job's last rank prints them."""
    return [float(value) for value in re.findall(r"lm loss value: (\S+)", run.outputs[-1])]
