"""Checkpoints carry over: from any plan to any plan, to stock Megatron and back.

A run saves after 2 of 4 steps; another one resumes there. Its curve must equal that of the run that
saved and went on (fp32: 1e-5). The second step is the first to change weights; of the other run the
first loss shows these, and the second one what the optimizer knew.
"""

import pickle
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.megatron.comparison import (
    BASE_FLAGS,
    GLOBAL_BATCH_SIZE,
    MAX_LOSS_DIFFERENCE,
    MAX_RELATIVE_WEIGHT_DIFFERENCE,
    MODELS,
    MUON,
    SGD,
    UNTIED,
    Model,
    Recorded,
    flags_for,
    largest_difference,
    plan_run,
    run_recorded,
    stock_run,
)
from tests.megatron.plans import (
    BOTH_ENDS,
    LAYOUTS,
    TWO_BY_TWO,
    in_the_host,
    plan_of,
    replica,
    tp_replica,
)
from tests.megatron.small_run import TOKENIZER_FLAGS
from tests.shared import directory_of, name_of
from tests.strategies import trained_plans
from zorse_megatron.errors import RankFailure
from zorse_megatron.plan.plan import Plan, TpShards

MAX_DIFFERENCE = 1e-5
SAVED, STEPS = 2, 4
PIPELINE_2 = ("--pipeline-model-parallel-size", "2")

# Ranks of which some hold no KV group, no column or no row; in the second group beside a rank that
# holds everything.
SOME_HOLD_NONE = plan_of(
    (
        (tp_replica((0, 1), 4, 2, tp_shards=TpShards(kv_groups=(0, 4), vocabulary_rows=(256, 0))),),
        2,
    ),
    (
        (
            tp_replica(
                (2, 3), 2, 3, tp_shards=TpShards(mlp_columns=(128, 0), vocabulary_rows=(0, 256))
            ),
            replica(4, 1, 2, 3.0),
        ),
        2,
    ),
)
# name -> plan, or stock's flags and world size.
RUNS: dict[str, Plan | tuple[tuple[str, ...], int]] = {
    "1|3|1": LAYOUTS["1|3|1, ends inside"],
    "1|2": LAYOUTS["1|2"],
    "2x2 in the host": in_the_host(TWO_BY_TWO),
    "both ends in the host": in_the_host(BOTH_ENDS),
    "TP groups": SOME_HOLD_NONE,
    # Of equal parts, but the embedding's two copies are cut differently.
    "a TP group, then a rank": plan_of(((tp_replica((0, 1), 2, 4),), 2), ((replica(2, 4, 2),), 2)),
    "stock": ((), 1),
    "stock PP=2": (PIPELINE_2, 2),
}


def start(name: str, flags: list[str]) -> Recorded:
    run = RUNS[name]
    if isinstance(run, Plan):
        return plan_run(run, flags)
    more, world_size = run
    return run_recorded([*flags, *more], world_size)


@pytest.fixture
def saved(corpus: Path) -> "Saved":
    return Saved(corpus)


class Saved:
    """Runs that saved, each made once."""

    def __init__(self, corpus: Path) -> None:
        self.corpus = corpus

    def flags(self, *more: str) -> list[str]:
        return [
            *BASE_FLAGS,
            *("--train-iters", str(STEPS), "--data-path", str(self.corpus), "--split", "90,5,5"),
            *TOKENIZER_FLAGS,
            *("--eod-mask-loss", "--clip-grad", "0.5", "--save-interval", str(SAVED)),
            *more,
        ]

    def by(self, name: str, *more: str) -> tuple[Path, Recorded]:
        def run(directory: Path) -> None:
            found = start(name, self.flags("--save", str(directory / "checkpoints"), *more))
            (directory / "run").write_bytes(pickle.dumps(found))

        directory = directory_of(name_of("saved", name, more), run)
        return directory / "checkpoints", pickle.loads((directory / "run").read_bytes())

    def resume(self, name: str, directory: Path, *more: str) -> Recorded:
        where = ("--load", str(directory), "--ckpt-step", str(SAVED))
        return start(name, self.flags(*where, *more))


def assert_same_rest(resumed: Recorded, uninterrupted: Recorded) -> None:
    rest = uninterrupted.steps[SAVED:]
    assert len(resumed.steps) == len(rest) == STEPS - SAVED
    for mine, theirs in zip(resumed.steps, rest, strict=True):
        step = mine["iteration"]
        assert step == theirs["iteration"]
        assert mine["lr"] == pytest.approx(theirs["lr"], rel=1e-12)
        loss, expected = mine["loss"]["lm loss"], theirs["loss"]["lm loss"]
        assert abs(loss - expected) <= MAX_DIFFERENCE, f"loss of step {step}"
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4), f"step {step}"


# What a plan writes is read by stock and by other plans, and what stock writes by plans. "Both
# ends" has a replica that computes nothing, and one that owns nothing.
PAIRS = [
    ("both ends in the host", "stock PP=2"),
    ("stock PP=2", "1|3|1"),
    ("stock PP=2", "TP groups"),
    ("a TP group, then a rank", "stock"),
]
# A tied embedding is the harder one to save, of which several ranks have copies. Untied, "both
# ends" goes on from its own checkpoints in `test_memory_faults`. Stock writes checkpoints of SGD,
# and cannot read the optimizer's part.
UNTIED_PAIRS = [("stock", "1|2"), ("1|2", "2x2 in the host")]


@pytest.mark.parametrize(
    ("by", "then", "tied"),
    [*((*pair, True) for pair in PAIRS), *((*pair, False) for pair in UNTIED_PAIRS)],
)
def test_resumes(by: str, then: str, tied: bool, saved: Saved) -> None:
    more = () if tied else (*UNTIED, *SGD)
    directory, uninterrupted = saved.by(by, *more)
    assert_same_rest(saved.resume(then, directory, *more), uninterrupted)


@settings(
    max_examples=examples(5),
    deadline=None,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
    suppress_health_check=list(HealthCheck),
)
@given(data=st.data(), model=st.sampled_from(MODELS))
def test_any_plan_goes_on_from_a_checkpoint_of_any(
    *, data: st.DataObject, model: Model, corpus: Path
) -> None:
    drawn = trained_plans(
        *(model.sizes, GLOBAL_BATCH_SIZE),
        max_world=4,
        max_ranks_per_replica=2,
        in_tp_groups=model.in_tp_groups,
    )
    first, then = data.draw(drawn), data.draw(drawn)
    flags = flags_for(corpus, *model.flags, steps=STEPS)
    with tempfile.TemporaryDirectory() as directory:
        plan_run(first, [*flags, "--save", directory, "--save-interval", str(SAVED)])
        resumed = plan_run(then, [*flags, "--load", directory, "--ckpt-step", str(SAVED)])
    uninterrupted = stock_run(flags)
    for mine, its in zip(resumed.losses, uninterrupted.losses[SAVED:], strict=True):
        assert abs(mine - its) <= MAX_LOSS_DIFFERENCE
    (weights,) = uninterrupted.of_ranks
    found = largest_difference(resumed, resumed.of_ranks, weights)
    assert found <= MAX_RELATIVE_WEIGHT_DIFFERENCE


def test_resumes_in_the_distributed_optimizer_s_format_from_without(saved: Saved) -> None:
    """Which stock refuses where other layers are on a rank."""
    directory, uninterrupted = saved.by("stock PP=2")
    more = ("--use-distributed-optimizer", "--ckpt-fully-parallel-load")
    assert_same_rest(saved.resume("1|3|1", directory, *more), uninterrupted)


def test_resumes_with_muon(saved: Saved) -> None:
    """From plan to plan; stock has two optimizers then, with a state each."""
    directory, uninterrupted = saved.by("1|2", *MUON)
    assert_same_rest(saved.resume("1|3|1", directory, *MUON), uninterrupted)
    directory, _ = saved.by("stock", *MUON)
    with pytest.raises(RankFailure, match="that of several optimizers, as stock has with Muon"):
        saved.resume("1|2", directory, *MUON)


DISTRIBUTED_OPTIMIZER = (
    "--bf16",
    "--use-distributed-optimizer",
    "--ckpt-fully-parallel-load",
    "--ckpt-assume-constant-structure",
)


def test_resumes_with_main_weights(saved: Saved, tmp_path: Path) -> None:
    """Main weights, moments and step are whole: the same plan goes on bit for bit, and saves.

    In fp16 and with its loss scale: `test_moving` and `test_optimizer_checkpoint`.
    """
    plan, other = "2x2 in the host", "1|2"
    directory, uninterrupted = saved.by(plan, *DISTRIBUTED_OPTIMIZER)
    assert "(--dist-ckpt-optim-fully-reshardable)" in uninterrupted.outputs[0]
    again = ("--save", str(tmp_path))  # by groups of one rank and of two
    resumed = saved.resume(plan, directory, *DISTRIBUTED_OPTIMIZER, *again)
    assert resumed.steps == uninterrupted.steps[SAVED:]
    found = saved.resume(other, directory, *DISTRIBUTED_OPTIMIZER)
    # Another plan adds up in another order, so from the second step on 16 bits may differ.
    assert found.losses[0] == pytest.approx(uninterrupted.losses[SAVED], abs=2e-3)
