"""Is the checkpoint whole that is about to be loaded? Asked before the model is built.

Rank 0 finds the checkpoint as stock would; each node compares names and sizes; each file is read
once, by one rank. What is not whole stops all ranks with one message, or an older one is taken.
"""

import os
import time
import traceback
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from zorse_megatron.adapter.checkpoint.saved_schedule import same_schedule
from zorse_megatron.adapter.checkpoint.shared_reads import on_rank_0, read_together
from zorse_megatron.adapter.patches import checkpoints
from zorse_megatron.adapter.patches.rebind import Replacements
from zorse_megatron.checkpoints.check import (
    Look,
    content_problem,
    shares,
    size_problems,
    with_cause,
)
from zorse_megatron.checkpoints.choice import SKIP, TITLE, Chooser, Load
from zorse_megatron.checkpoints.folder import Checkpoint
from zorse_megatron.errors import CheckpointError, FlagError, Problem, ZorseError
from zorse_megatron.log import say
from zorse_megatron.runtime.collectives import gathered
from zorse_megatron.watch.processes.watched_rank import is_communication_error


def load_of(args: Namespace, *, skips_damaged: bool) -> Load | None:
    """What the command says about loading; None: nothing to check.

    Raises FlagError where a damaged checkpoint is to be skipped in a folder that is only read.
    """
    roots = [each for each in (args.load, args.pretrained_checkpoint) if each is not None]
    if not roots:
        return None
    if any("://" in root for root in roots):
        say(f"{' and '.join(roots)}: no check of what is not in files")
        return None
    if skips_damaged and (
        args.load is None
        or args.save is None
        or os.path.realpath(args.load) != os.path.realpath(args.save)
    ):
        raise FlagError("The command cannot be used", [_not_the_folder_of_save(args)])
    return Load(
        root=None if args.load is None else Path(args.load),
        step=args.ckpt_step,
        pretrained=None if args.pretrained_checkpoint is None else Path(args.pretrained_checkpoint),
        is_needed=args.exit_on_missing_checkpoint,
        skips_damaged=skips_damaged,
    )


def check_before_load(load: Load) -> Checkpoint | None:
    """Find the checkpoint that stock would load, and read it; a collective call of all ranks.

    Returns what rank 0 has found, which is what all ranks are to load (see `same_on_all`); None:
    training starts from the beginning. Raises CheckpointError on every rank where it is not whole
    and none may take its place, OSError where a file cannot be read.
    """
    chooser = Chooser(load)
    while (look := on_rank_0(partial(_choose, chooser))) is not None:
        started_s = time.monotonic()
        problems = _problems_of(look)
        if not problems:
            _say_checked(look, time.monotonic() - started_s)
            return look.checkpoint
        chooser.reject(look.checkpoint, problems)
    return None


def _choose(chooser: Chooser) -> Look | None:
    """What is to be loaded; says what there is to say of it."""
    try:
        return chooser.choose()
    finally:
        for note in chooser.notes:
            say(note)
        chooser.notes.clear()


def _problems_of(look: Look) -> tuple[Problem, ...]:
    """What is wrong with a checkpoint's files; on every rank, or on none."""
    manifest = look.manifest
    if manifest is None:
        return ()
    folder = look.checkpoint.folder
    mine: list[Problem] = []
    if os.environ.get("LOCAL_RANK", "0") == "0":
        # A node may not see the folder at all, where it is on another one's own disk.
        present = {path.name: path for path in folder.iterdir()} if folder.is_dir() else {}
        sizes = {name: present[name].stat().st_size for name in look.sizes if name in present}
        mine += size_problems(folder, manifest, sizes)
    names = shares(look.sizes, dist.get_world_size())[dist.get_rank()]
    records = read_together(folder, names, manifest.algorithm, total_bytes=look.num_bytes)
    for name, record in records.items():
        if (problem := content_problem(folder, name, manifest, record)) is not None:
            mine.append(problem)
    found = {problem: None for each in gathered(mine) for problem in each}
    return with_cause(folder, manifest, list(found))


def _say_checked(look: Look, wall_s: float) -> None:
    folder = look.checkpoint.folder
    if look.manifest is None:
        say(
            f"{folder} has no manifest, as one of stock's: its {len(look.sizes)} files have the "
            "sizes that they need, and are not verified beyond that"
        )
        return
    say(
        f"{folder} is whole: {len(look.sizes)} files, {look.num_bytes / 1e9:.2f} GB, read in "
        f"{wall_s:.1f} s"
    )


def _make_load(stock_load: Callable[..., Any]) -> Callable[..., Any]:
    def load_checkpoint(*args: Any, **kwargs: Any) -> Any:
        try:
            with same_schedule():
                return stock_load(*args, **kwargs)
        except SystemExit as request:
            raise CheckpointError(TITLE, [_gave_up(request)]) from request
        except (Exception, CheckpointException) as error:
            if not _is_about_content(error):
                raise
            traceback.print_exc()
            raise CheckpointError(TITLE, [_unreadable(error)]) from error

    return load_checkpoint


def _is_about_content(error: BaseException) -> bool:
    """Whether another start would meet the same error: it is not about a rank, a disk or a GPU."""
    if isinstance(error, CheckpointException):
        return all(_is_about_content(failure[0]) for failure in error.failures.values())
    transient = (ZorseError, OSError, MemoryError, torch.OutOfMemoryError, torch.AcceleratorError)
    return not isinstance(error, transient) and not is_communication_error(error)


def _gave_up(request: SystemExit) -> Problem:
    return Problem(
        where="--load",
        found=f"that Megatron ended the job with status {request.code or 0}",
        expected="a checkpoint that can be loaded",
        remedy="The lines above say why.",
    )


def _unreadable(error: BaseException) -> Problem:
    line = next(iter(str(error).splitlines()), "")
    return Problem(
        where="--load",
        found=f"{type(error).__name__}: {line}",
        expected="a checkpoint that Megatron can load with this command",
        remedy="The traceback above says where. If the model is another one, correct the flags; "
        "else resume from an older checkpoint: zorse checkpoint verify lists them.",
    )


def _not_the_folder_of_save(args: Namespace) -> Problem:
    return Problem(
        where=SKIP,
        found=f"--load {args.load} and --save {args.save}",
        expected="one folder for both: its tracker file is set back",
        remedy="Leave the flag out, and name the checkpoint to load with --ckpt-step.",
    )


LOAD_HOOKS: Replacements = {checkpoints.LOAD_CHECKPOINT: _make_load}
