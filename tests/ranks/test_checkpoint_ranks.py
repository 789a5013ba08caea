"""Ranks write a manifest together, and read each file of a checkpoint once, whoever saved it."""

import json
import os
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.ranks.harness import run_ranks
from tests.unit.checkpoint_folders import flip, save
from zorse_megatron.adapter.checkpoint import before_load, saving
from zorse_megatron.adapter.checkpoint.before_load import check_before_load, load_of
from zorse_megatron.errors import CheckpointError, FlagError
from zorse_megatron.live.checkpoint_check import State, look_at, read_through
from zorse_megatron.live.checkpoint_choice import Load
from zorse_megatron.live.checkpoint_files import (
    MANIFEST,
    STOCK_MANIFEST,
    Checkpoint,
    Hashing,
    read_tracker,
)

WORLD_SIZE = 3
SHARD_BYTES = (5000, 0, 100)


def _stock_save(at_once: bool) -> Callable[..., Any]:
    """Writes as Megatron does; `at_once`: else it leaves the last steps to who asks for them."""

    def write(folder: Path) -> None:
        rank = dist.get_rank()
        (folder / f"__{rank}_0.distcp").write_bytes(bytes([rank]) * SHARD_BYTES[rank])
        if rank == 0:
            (folder / ".metadata").write_bytes(b"what is where")
            (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
        dist.barrier()

    def save_checkpoint(_state: Any, checkpoint_dir: str) -> Any:
        if at_once:
            write(Path(checkpoint_dir))
            return None
        return Namespace(finalize_fns=[lambda: write(Path(checkpoint_dir))])

    return save_checkpoint


def _save_job(root: str, at_once: bool) -> bool:
    folder = Path(root, "iter_0000003")
    save_checkpoint = saving._make_save(_stock_save(at_once))
    request = save_checkpoint({}, str(folder))
    for finalize in request.finalize_fns if request is not None else ():
        assert not (folder / MANIFEST).exists()
        finalize()
    return (folder / MANIFEST).exists()


@pytest.mark.parametrize("at_once", [True, False], ids=["at once", "--async-save"])
def test_all_ranks_write_one_manifest(at_once: bool, tmp_path: Path) -> None:
    checkpoint = Checkpoint(root=tmp_path, iteration=3)
    checkpoint.folder.mkdir()
    # What a job of more ranks has left there is of no checkpoint; nor is an old manifest.
    (checkpoint.folder / "__7_0.distcp").write_bytes(b"left")
    (checkpoint.folder / MANIFEST).write_text("old")
    (checkpoint.folder / STOCK_MANIFEST).write_text("old")
    assert run_ranks(WORLD_SIZE, _save_job, str(tmp_path), at_once) == [True] * WORLD_SIZE
    look = read_through(look_at(checkpoint))
    assert look.state is State.WHOLE and look.is_read
    shards = {f"__{rank}_0.distcp": count for rank, count in enumerate(SHARD_BYTES)}
    assert look.sizes == {**shards, ".metadata": 13, "metadata.json": 33}


def _load_job(root: str, skips: bool) -> tuple[Any, list[str]]:
    """What a rank finds, or the checkpoint to load, and the files that it has read."""
    read: list[str] = []

    class Noted(Hashing):
        def __init__(self, path: Path, algorithm: str) -> None:
            super().__init__(path, algorithm)
            read.append(str(path.relative_to(root)))

    before_load.Hashing = Noted  # type: ignore[misc]
    before_load._BYTES_BETWEEN_EXCHANGES = 64
    try:
        found = check_before_load(Load(root=Path(root), skips_damaged=skips))
    except CheckpointError as error:
        return [problem.where for problem in error.problems], read
    return found, read


def test_each_file_is_read_by_one_rank(tmp_path: Path) -> None:
    checkpoint = save(tmp_path, 4)
    found = run_ranks(WORLD_SIZE, _load_job, str(tmp_path), False)
    assert [chosen for chosen, _ in found] == [checkpoint] * WORLD_SIZE
    names = json.loads((checkpoint.folder / MANIFEST).read_text())["files"]
    assert sorted(name for _, read in found for name in read) == sorted(
        f"iter_0000004/{name}" for name in names
    )


def test_every_rank_refuses_what_one_has_found(tmp_path: Path) -> None:
    save(tmp_path, 2)
    latest = save(tmp_path, 4)
    damaged = latest.folder / "__1_0.distcp"
    flip(damaged)
    found = run_ranks(WORLD_SIZE, _load_job, str(tmp_path), False)
    assert [problems for problems, _ in found] == [[str(damaged)]] * WORLD_SIZE
    assert read_tracker(tmp_path).names == latest


def test_all_ranks_go_back_together(tmp_path: Path) -> None:
    older = save(tmp_path, 2)
    for iteration in (4, 6):
        flip(save(tmp_path, iteration).folder / "__0_0.distcp")
    found = run_ranks(WORLD_SIZE, _load_job, str(tmp_path), True)
    assert [chosen for chosen, _ in found] == [older] * WORLD_SIZE
    assert read_tracker(tmp_path).names == older


def _job_on_a_node(node: str) -> tuple[Any, list[str]]:
    os.environ["LOCAL_RANK"] = "0"
    os.chdir(Path(node, str(dist.get_rank())))
    return _load_job("checkpoints", False)


def test_a_node_that_does_not_see_the_checkpoint(tmp_path: Path) -> None:
    """It is told as damage is: another start would not change it."""
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
    save(tmp_path / "0" / "checkpoints", 4)
    for problems, _ in run_ranks(2, _job_on_a_node, str(tmp_path)):
        assert "checkpoints/iter_0000004/__0_0.distcp" in problems


def _unreadable_job(root: str) -> str:
    folder = Path(root, "iter_0000004")
    if dist.get_rank() == 1:

        def fails(self: Hashing) -> Any:
            raise OSError(5, "Input/output error", str(self.path))

        Hashing.pieces = fails  # type: ignore[method-assign]
    try:
        before_load.read_together(folder, [f"__{dist.get_rank()}_0.distcp"], "xxh3_128")
    except OSError as error:
        return f"{error.strerror}: {Path(str(error.filename)).name}"
    return "read"


def test_a_disk_that_fails_is_no_damage(tmp_path: Path) -> None:
    save(tmp_path, 4)
    answers = run_ranks(2, _unreadable_job, str(tmp_path))
    assert answers == ["Input/output error: __1_0.distcp"] * 2


def test_only_the_folder_of_save_is_set_back(tmp_path: Path) -> None:
    given = {
        "pretrained_checkpoint": None,
        "ckpt_step": None,
        "exit_on_missing_checkpoint": False,
    }
    args = Namespace(load=f"{tmp_path}/a/../a", save=f"{tmp_path}/a", **given)
    load = load_of(args, skips_damaged=True)
    assert load is not None and load.root == Path(args.load) and load.skips_damaged
    args.save = f"{tmp_path}/b"
    with pytest.raises(FlagError, match="one folder for both"):
        load_of(args, skips_damaged=True)
    assert load_of(args, skips_damaged=False) is not None
    args.load = None
    assert load_of(args, skips_damaged=False) is None
