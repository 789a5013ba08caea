"""Checkpoints of unequal shards: the same as stock's, and loaded by any plan and by stock."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.megatron.checkpoint_jobs import Job, read_checkpoint, run_job
from tests.megatron.preloaded import run_megatron_ranks
from tests.megatron.tiny_gpt import Setup
from tests.ranks.harness import RanksFailed
from tests.shared import once_per_run

STOCK = Job(stock=True)
ONE_GROUP = Job(groups=((0, 1, 2),), weights=((3, 1, 0),))
OTHER_GROUP = Job(groups=((0, 1),), weights=((1, 2),), fully_parallel=True)
# Rank 0, which writes the common part, owns nothing.
TWO_STAGES = Job(groups=((0, 1), (2,)), weights=((0, 1), (1,)))
OTHER_STAGES = Job(groups=((0,), (1, 2)), weights=((1,), (1, 3)), fully_parallel=True)

FP32, BF16, FP16 = Setup(), Setup(dtype=torch.bfloat16), Setup(dtype=torch.float16)


def _run(
    job: Job,
    setup: Setup,
    *,
    steps: range,
    load: Path | None = None,
    save: Path | None = None,
) -> dict[str, torch.Tensor]:
    """Run a job; returns the whole model's weights, checked to be equal on all ranks."""
    weights: dict[str, torch.Tensor] = {}
    for part in run_megatron_ranks(
        job.world_size, _run_on_rank, job, setup, steps, load, save, timeout_s=120
    ):
        for name, array in part.items():
            weight = torch.from_numpy(array)
            key = "embedding.word_embeddings.weight" if name == "output_layer.weight" else name
            assert torch.equal(weights.setdefault(key, weight), weight), name
    return weights


@once_per_run
def _uninterrupted(setup: Setup) -> dict[str, torch.Tensor]:
    """The weights after four steps of stock."""
    return _run(STOCK, setup, steps=range(4))


def _run_on_rank(job: Job, setup: Setup, steps: range, load: Any, save: Any) -> dict:
    # As arrays: Megatron changes how tensors pickle, and must not be imported by unpickling here.
    weights = run_job(job, setup, steps=steps, load=load, save=save)
    return {name: weight.numpy() for name, weight in weights.items()}


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


@pytest.mark.parametrize("job", [ONE_GROUP, TWO_STAGES], ids=["one-group", "two-stages"])
@pytest.mark.parametrize("distributed", [False, True], ids=["replicated", "distributed"])
@pytest.mark.parametrize("setup", [FP32, BF16, FP16], ids=["fp32", "bf16", "fp16"])
def test_a_plan_writes_the_checkpoint_that_stock_writes(
    tmp_path: Path, setup: Setup, distributed: bool, job: Job
) -> None:
    """Every key, shape, dtype and bit, and the common part."""
    _run(_laid_out(STOCK, distributed), setup, steps=range(2), save=tmp_path / "stock")
    _run(_laid_out(job, distributed), setup, steps=range(2), save=tmp_path / "plan")
    run_megatron_ranks(1, _assert_same_checkpoint, tmp_path / "plan", tmp_path / "stock")


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (STOCK, ONE_GROUP),
        (STOCK, OTHER_STAGES),
        (ONE_GROUP, STOCK),
        (TWO_STAGES, STOCK),
        (ONE_GROUP, OTHER_GROUP),
        (TWO_STAGES, OTHER_STAGES),
        (OTHER_STAGES, OTHER_GROUP),
    ],
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
@pytest.mark.parametrize("setup", [FP32, FP16], ids=["fp32", "fp16"])
def test_training_goes_on_exactly(tmp_path: Path, setup: Setup, first: Job, second: Job) -> None:
    whole = _uninterrupted(setup)
    _run(first, setup, steps=range(2), save=tmp_path / "checkpoint")
    resumed = _run(second, setup, steps=range(2, 4), load=tmp_path / "checkpoint")
    _assert_equal(resumed, whole)


def test_weights_alone_start_a_new_training(tmp_path: Path) -> None:
    """The fp32 copies that bf16 is trained on are made from the loaded weights."""
    _run(STOCK, BF16, steps=range(2), save=tmp_path / "stock")
    jobs = [replace(job, weights_only=True) for job in (STOCK, ONE_GROUP)]
    stock, plan = (_run(job, BF16, steps=range(2), load=tmp_path / "stock") for job in jobs)
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


def test_both_layouts_load_whatever_the_flags(tmp_path: Path) -> None:
    """bf16; a plan that writes one layout reads the other, and stock's distributed one."""
    whole = _uninterrupted(BF16)
    for number, (first, second) in enumerate(
        [
            (_laid_out(STOCK, True), OTHER_GROUP),
            (_laid_out(TWO_STAGES, True), ONE_GROUP),
            (ONE_GROUP, _laid_out(OTHER_STAGES, True)),
        ]
    ):
        directory = tmp_path / str(number)
        _run(first, BF16, steps=range(2), save=directory)
        _assert_equal(_run(second, BF16, steps=range(2, 4), load=directory), whole)


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
