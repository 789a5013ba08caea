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
# Rank 0, which writes the common part, owns nothing.
TWO_STAGES = Job(groups=((0, 1), (2,)), weights=((0, 1), (1,)))
OTHER_STAGES = Job(groups=((0,), (1, 2)), weights=((1,), (1, 3)), fully_parallel=True)

# bf16 has main parameters as fp16 has, and no loss scaler.
FP32, FP16 = Setup(), Setup(dtype=torch.float16)
FUSED = Setup(dtype=torch.bfloat16, fused_adam=True)
SETUPS = {"fp32": FP32, "fp16": FP16}
LAYOUTS = ("replicated", "distributed")
WRITERS = {"stock": STOCK, "one-group": ONE_GROUP, "two-stages": TWO_STAGES}
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


def _uninterrupted(setup: Setup) -> dict[str, torch.Tensor]:
    """The weights after four steps of stock."""
    return _all_uninterrupted()[[*SETUPS.values(), FUSED].index(setup)]


@once_per_run
def _all_uninterrupted() -> list[dict[str, torch.Tensor]]:
    setups = (*SETUPS.values(), FUSED)
    return _run_all([Training(job=STOCK, setup=setup, steps=range(4)) for setup in setups])


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
    """A checkpoint after two steps; the first of stock, or of a plan, makes all of them."""
    writers = ("stock",) if writer == "stock" else COMPARED

    def make(directory: Path) -> None:
        _run_all(
            [
                Training(
                    job=_laid_out(WRITERS[each], layout == "distributed"),
                    setup=setup,
                    steps=range(2),
                    save=directory / f"{each}-{name}-{layout}",
                )
                for each in writers
                for name, setup in SETUPS.items()
                for layout in LAYOUTS
            ]
        )

    (name,) = (name for name, each in SETUPS.items() if each == setup)
    directory = directory_of(name_of("optimizer checkpoints", writers), make)
    return directory / f"{writer}-{name}-{layout}"


def assert_equal(found: Any, expected: Any, where: str = "") -> None:
    """Compare nested dicts and lists of tensors and plain values, bit for bit."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key in expected:
            assert_equal(found[key], expected[key], f"{where}.{key}")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), where
        for number, item in enumerate(expected):
            assert_equal(found[number], item, f"{where}.{number}")
    elif isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype and torch.equal(found, expected), where
    else:
        assert found == expected and type(found) is type(expected), where


def _assert_same_checkpoint(found: Path, expected: Path) -> None:
    tensors, common = read_checkpoint(expected)
    assert any(key.startswith("optimizer.state.exp_avg_sq.") for key in tensors)
    assert_equal(read_checkpoint(found), (tensors, common))


def _laid_out(job: Job, distributed: bool) -> Job:
    return replace(job, distributed_layout=distributed)


@once_per_run
def _differences() -> dict[tuple[str, str, str], str | None]:
    """Writer, type, layout -> where the checkpoint of a plan is not stock's, if anywhere."""
    cases = {
        (writer, name, layout): (_saved(writer, setup, layout), _saved("stock", setup, layout))
        for writer in COMPARED
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
    assert _differences()[writer, setup, layout] is None


RESUMES = {
    "stock-to-plan": ("stock", ONE_GROUP),
    "stock-to-stages": ("stock", OTHER_STAGES),
    "plan-to-stock": ("one-group", STOCK),
    "stages-to-stock": ("two-stages", STOCK),
    "plan-to-stages": ("one-group", OTHER_STAGES),
    "stages-to-stages": ("two-stages", OTHER_STAGES),
    "stages-to-plan": ("two-stages", ONE_GROUP),
}


@once_per_run
def _resumed(world_size: int) -> dict[tuple[str, str], dict[str, torch.Tensor]]:
    """Of readers with so many ranks: which case and in which type -> the weights at the end."""
    cases = {
        (case, name): Training(
            job=reader,
            setup=SETUPS[name],
            steps=range(2, 4),
            load=_saved(writer, SETUPS[name], "replicated"),
        )
        for case, (writer, reader) in RESUMES.items()
        if reader.world_size == world_size
        for name in ("fp32", "fp16")
    }
    return dict(zip(cases, _run_all(list(cases.values())), strict=True))


@pytest.mark.parametrize("case", RESUMES)
@pytest.mark.parametrize("setup", ["fp32", "fp16"])
def test_training_goes_on_exactly(setup: str, case: str) -> None:
    found = _resumed(RESUMES[case][1].world_size)[case, setup]
    assert_equal(found, _uninterrupted(SETUPS[setup]))


def test_weights_alone_start_a_new_training() -> None:
    """The fp32 copies that fp16 is trained on are made from the loaded weights."""
    directory = _saved("stock", FP16, "replicated")
    jobs = [replace(job, weights_only=True) for job in (STOCK, ONE_GROUP)]
    (stock,), (plan,) = (
        _run_all([Training(job=job, setup=FP16, steps=range(2), load=directory)]) for job in jobs
    )
    assert_equal(plan, stock)


def test_stock_goes_on_from_a_checkpoint_of_before_the_first_update(tmp_path: Path) -> None:
    """Such as one of fp16 whose steps were all skipped."""
    _run_all([Training(job=ONE_GROUP, setup=FP16, steps=(), save=tmp_path / "saved")])
    resumed = Training(job=STOCK, setup=FP16, steps=range(4), load=tmp_path / "saved")
    (found,) = _run_all([resumed])
    assert_equal(found, _uninterrupted(FP16))


def test_steps_counted_per_group_are_kept(tmp_path: Path) -> None:
    """As the fused Adams do; rank 0 owns nothing, so it has no count of its own."""
    saves = [
        Training(
            job=_laid_out(TWO_STAGES, layout == "distributed"),
            setup=FUSED,
            steps=range(2),
            save=tmp_path / layout,
        )
        for layout in LAYOUTS
    ]
    loads = [
        Training(job=OTHER_STAGES, setup=FUSED, steps=range(2, 4), load=tmp_path / layout)
        for layout in LAYOUTS
    ]
    # Stock's distributed optimizer needs the real FusedAdam.
    stock = [
        Training(job=STOCK, setup=FUSED, steps=range(2), save=tmp_path / "stock"),
        Training(job=STOCK, setup=FUSED, steps=range(2, 4), load=tmp_path / "replicated"),
    ]
    for found in (*_run_all([*saves, *loads])[2:], _run_all(stock)[1]):
        assert_equal(found, _uninterrupted(FUSED))
    run_megatron_ranks(1, _assert_same_checkpoint, tmp_path / "replicated", tmp_path / "stock")


def test_both_layouts_load_whatever_the_flags() -> None:
    """fp16; a plan that writes one layout reads the other, and stock's distributed one."""
    readers = [
        ("stock", "distributed", replace(ONE_GROUP, fully_parallel=True)),
        ("two-stages", "distributed", ONE_GROUP),
        ("one-group", "replicated", _laid_out(OTHER_STAGES, True)),
    ]
    trainings = [
        Training(job=job, setup=FP16, steps=range(2, 4), load=_saved(writer, FP16, layout))
        for writer, layout, job in readers
    ]
    for found in _run_all(trainings):
        assert_equal(found, _uninterrupted(FP16))


def test_saves_of_constant_structure(tmp_path: Path) -> None:
    """Groups of one and of two ranks save several times; the last save loads."""
    job = replace(OTHER_STAGES, constant_structure=True)
    save = Training(job=job, setup=FP32, steps=range(2), save=tmp_path / "save")
    load = tmp_path / "save_next_next"
    resume = Training(job=ONE_GROUP, setup=FP32, steps=range(2, 4), load=load)
    assert_equal(_run_all([save, resume])[1], _uninterrupted(FP32))


def test_shardings_that_only_their_writer_can_read_are_refused() -> None:
    with pytest.raises(RanksFailed, match="--dist-ckpt-optim-fully-reshardable"):
        run_megatron_ranks(1, _load_dp_reshardable)


def _load_dp_reshardable() -> None:
    from tests.megatron import tiny_gpt

    tiny_gpt.start()
    collection = tiny_gpt.groups_of([[0]], FP32)
    chunk, optimizer = tiny_gpt.make_ours(FP32, collection, (1,), distributed_layout=True)
    metadata = {"distrib_optim_sharding_type": "dp_reshardable", "dp_cp_group": collection.dp_cp}
    state = {"model": chunk.sharded_state_dict(metadata=metadata)}
    optimizer.sharded_state_dict(state, is_loading=True, metadata=metadata)
