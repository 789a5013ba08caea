"""Checkpoints of unequal shards: the same as stock's, and loaded by any plan and by stock."""

import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.megatron.checkpoint_jobs import Job, read_checkpoint, run_job
from tests.megatron.preloaded import run_megatron_ranks
from tests.megatron.tiny_gpt import Setup
from tests.ranks.harness import RanksFailed
from tests.shared import directory_of, name_of, once_per_run

STOCK = Job(stock=True)
ONE_GROUP = Job(groups=((0, 1, 2),), weights=((3, 1, 0),))
OTHER_GROUP = Job(groups=((0, 1),), weights=((1, 2),), fully_parallel=True)
# Rank 0, which writes the common part, owns nothing.
TWO_STAGES = Job(groups=((0, 1), (2,)), weights=((0, 1), (1,)))
OTHER_STAGES = Job(groups=((0,), (1, 2)), weights=((1,), (1, 3)), fully_parallel=True)

FP32, BF16, FP16 = Setup(), Setup(dtype=torch.bfloat16), Setup(dtype=torch.float16)
SETUPS = {"fp32": FP32, "bf16": BF16, "fp16": FP16}
LAYOUTS = ("replicated", "distributed")
WRITERS = {
    "stock": STOCK,
    "one-group": ONE_GROUP,
    "two-stages": TWO_STAGES,
    "other-stages": OTHER_STAGES,
}
COMPARED = ("one-group", "two-stages")


@dataclass(frozen=True, kw_only=True)
class Training:
    """What ranks do that are there for several trainings, one after the other."""

    job: Job
    setup: Setup
    steps: range
    load: Path | None = None
    save: Path | None = None


def _run_all(trainings: Sequence[Training]) -> list[dict[str, torch.Tensor]]:
    """Run them; returns the whole model's weights of each, checked to be equal on all ranks."""
    (world_size,) = {training.job.world_size for training in trainings}
    found: list[dict[str, torch.Tensor]] = [{} for _ in trainings]
    for rank in run_megatron_ranks(world_size, _run_on_rank, trainings, timeout_s=120):
        for weights, part in zip(found, rank, strict=True):
            for name, array in part.items():
                weight = torch.from_numpy(array)
                key = "embedding.word_embeddings.weight" if name == "output_layer.weight" else name
                assert torch.equal(weights.setdefault(key, weight), weight), name
    return found


def _run(job: Job, setup: Setup, **what: Any) -> dict[str, torch.Tensor]:
    return _run_all([Training(job=job, setup=setup, **what)])[0]


@once_per_run
def _uninterrupted(setup: Setup) -> dict[str, torch.Tensor]:
    """The weights after four steps of stock."""
    return _run(STOCK, setup, steps=range(4))


def _run_on_rank(trainings: Sequence[Training]) -> list[dict]:
    # As arrays: Megatron changes how tensors pickle, and must not be imported by unpickling here.
    return [
        {
            name: weight.numpy()
            for name, weight in run_job(
                each.job, each.setup, steps=each.steps, load=each.load, save=each.save
            ).items()
        }
        for each in trainings
    ]


def _saved(writer: str, setup: Setup, layout: str) -> Path:
    """A checkpoint after two steps; a writer's first makes all of them."""

    def make(directory: Path) -> None:
        _run_all(
            [
                Training(
                    job=_laid_out(WRITERS[writer], layout == "distributed"),
                    setup=setup,
                    steps=range(2),
                    save=directory / f"{name}-{layout}",
                )
                for name, setup in SETUPS.items()
                for layout in LAYOUTS
                if writer != "other-stages" or layout == "replicated"
            ]
        )

    (name,) = (name for name, each in SETUPS.items() if each == setup)
    return directory_of(name_of("optimizer checkpoints", writer), make) / f"{name}-{layout}"


def _assert_equal(found: Any, expected: Any, where: str = "") -> None:
    """Compare nested dicts and lists of tensors and plain values, bit for bit."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key in expected:
            _assert_equal(found[key], expected[key], f"{where}.{key}")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), where
        for number, item in enumerate(expected):
            _assert_equal(found[number], item, f"{where}.{number}")
    elif isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype and torch.equal(found, expected), where
    else:
        assert found == expected and type(found) is type(expected), where


def _assert_same_checkpoint(found: Path, expected: Path) -> None:
    tensors, common = read_checkpoint(expected)
    assert any(key.startswith("optimizer.state.exp_avg_sq.") for key in tensors)
    _assert_equal(read_checkpoint(found), (tensors, common))


def _laid_out(job: Job, distributed: bool) -> Job:
    return replace(job, distributed_layout=distributed)


@once_per_run
def _differences(writer: str) -> dict[tuple[str, str], str | None]:
    """Type and layout -> where the checkpoint of a plan is not stock's, if anywhere."""
    cases = {
        (name, layout): (_saved(writer, setup, layout), _saved("stock", setup, layout))
        for name, setup in SETUPS.items()
        for layout in LAYOUTS
    }
    return run_megatron_ranks(1, _differences_on_rank, cases)[0]


def _differences_on_rank(cases: dict[Any, tuple[Path, Path]]) -> dict[Any, str | None]:
    found: dict[Any, str | None] = {}
    for case, paths in cases.items():
        try:
            found[case] = _assert_same_checkpoint(*paths)
        except AssertionError:
            found[case] = traceback.format_exc()
    return found


@pytest.mark.parametrize("writer", COMPARED)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("setup", SETUPS)
def test_a_plan_writes_the_checkpoint_that_stock_writes(
    setup: str, layout: str, writer: str
) -> None:
    """Every key, shape, dtype and bit, and the common part."""
    assert _differences(writer)[setup, layout] is None


RESUMES = [
    ("stock", ONE_GROUP),
    ("stock", OTHER_STAGES),
    ("one-group", STOCK),
    ("two-stages", STOCK),
    ("one-group", OTHER_GROUP),
    ("two-stages", OTHER_STAGES),
    ("other-stages", OTHER_GROUP),
]


@once_per_run
def _resumed(reader: Job) -> dict[tuple[str, str], dict[str, torch.Tensor]]:
    """Who saved and in which type -> the weights with which the reader ends."""
    cases = [
        (writer, name) for writer, each in RESUMES if each == reader for name in ("fp32", "fp16")
    ]
    trainings = [
        Training(
            job=reader,
            setup=SETUPS[name],
            steps=range(2, 4),
            load=_saved(writer, SETUPS[name], "replicated"),
        )
        for writer, name in cases
    ]
    return dict(zip(cases, _run_all(trainings), strict=True))


@pytest.mark.parametrize(
    ("writer", "reader"),
    RESUMES,
    ids=[
        "stock-to-plan",
        "stock-to-stages",
        "plan-to-stock",
        "stages-to-stock",
        "plan-to-plan",
        "stages-to-stages",
        "stages-to-plan",
    ],
)
@pytest.mark.parametrize("setup", ["fp32", "fp16"])
def test_training_goes_on_exactly(setup: str, writer: str, reader: Job) -> None:
    _assert_equal(_resumed(reader)[writer, setup], _uninterrupted(SETUPS[setup]))


def test_weights_alone_start_a_new_training() -> None:
    """The fp32 copies that bf16 is trained on are made from the loaded weights."""
    directory = _saved("stock", BF16, "replicated")
    jobs = [replace(job, weights_only=True) for job in (STOCK, ONE_GROUP)]
    stock, plan = (_run(job, BF16, steps=range(2), load=directory) for job in jobs)
    _assert_equal(plan, stock)


@pytest.mark.parametrize("distributed", [False, True], ids=["replicated", "distributed"])
def test_steps_counted_per_group_are_kept(tmp_path: Path, distributed: bool) -> None:
    """As the fused Adams do; rank 0 owns nothing, so it has no count of its own."""
    setup = replace(BF16, fused_adam=True)
    whole = _uninterrupted(setup)
    stages = _laid_out(TWO_STAGES, distributed)
    _run(stages, setup, steps=range(2), save=tmp_path / "plan")
    _assert_equal(_run(OTHER_GROUP, setup, steps=range(2, 4), load=tmp_path / "plan"), whole)
    if not distributed:  # stock's distributed optimizer needs the real FusedAdam
        _run(STOCK, setup, steps=range(2), save=tmp_path / "stock")
        run_megatron_ranks(1, _assert_same_checkpoint, tmp_path / "plan", tmp_path / "stock")
        _assert_equal(_run(STOCK, setup, steps=range(2, 4), load=tmp_path / "plan"), whole)


def test_both_layouts_load_whatever_the_flags() -> None:
    """bf16; a plan that writes one layout reads the other, and stock's distributed one."""
    whole = _uninterrupted(BF16)
    for writer, layout, reader in (
        ("stock", "distributed", OTHER_GROUP),
        ("two-stages", "distributed", ONE_GROUP),
        ("one-group", "replicated", _laid_out(OTHER_STAGES, True)),
    ):
        directory = _saved(writer, BF16, layout)
        _assert_equal(_run(reader, BF16, steps=range(2, 4), load=directory), whole)


def test_saves_of_constant_structure(tmp_path: Path) -> None:
    """Groups of one and of two ranks save several times; the last save loads."""
    whole = _uninterrupted(FP32)
    job = replace(OTHER_STAGES, constant_structure=True)
    _run(job, FP32, steps=range(2), save=tmp_path / "save")
    resumed = _run(ONE_GROUP, FP32, steps=range(2, 4), load=tmp_path / "save_next_next")
    _assert_equal(resumed, whole)


def test_shardings_that_only_their_writer_can_read_are_refused() -> None:
    with pytest.raises(RanksFailed, match="--dist-ckpt-optim-fully-reshardable"):
        run_megatron_ranks(1, _save_dp_reshardable)


def _save_dp_reshardable() -> None:
    from tests.megatron import tiny_gpt

    tiny_gpt.start()
    collection = tiny_gpt.groups_of([[0]], FP32)
    chunk, optimizer = tiny_gpt.make_ours(FP32, collection, (1,), distributed_layout=True)
    metadata = {"distrib_optim_sharding_type": "dp_reshardable", "dp_cp_group": collection.dp_cp}
    state = {"model": chunk.sharded_state_dict(metadata=metadata)}
    optimizer.sharded_state_dict(state, metadata=metadata)
