"""Before a checkpoint is loaded: which one, is it whole, has it the command's schedules?

Rank 0 finds the checkpoint as stock would; each node compares names and sizes; each file is read
once, by one rank. What is not whole stops all ranks with one message, or an older one is taken.
"""

import os
import time
import traceback
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from zorse_megatron.adapter.patches.rebind import REGISTRY, Replacements
from zorse_megatron.errors import CheckpointError, FlagError, Problem, ZorseError
from zorse_megatron.flags.model_in_flags import layers_with_experts
from zorse_megatron.live.checkpoint_check import (
    Look,
    content_problem,
    shares,
    size_problems,
    with_cause,
)
from zorse_megatron.live.checkpoint_choice import (
    SKIP,
    TITLE,
    Chooser,
    Load,
    SavedExperts,
    may_lack_weights,
    other_experts,
)
from zorse_megatron.live.checkpoint_files import Checkpoint, FileRecord, Hashing
from zorse_megatron.live.watched_rank import is_communication_error
from zorse_megatron.log import say
from zorse_megatron.runtime.collectives import gathered, on_rank_0
from zorse_megatron.weights.opened import opened

_HEAD = "output_layer.weight"


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
        raise FlagError.of(
            "The command cannot be used",
            where=SKIP,
            found=f"--load {args.load} and --save {args.save}",
            expected="one folder for both: its tracker file is set back",
            remedy="Leave the flag out, and name the checkpoint to load with --ckpt-step.",
        )
    return Load.of(args, skips_damaged=skips_damaged)


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


def refuse_other_model(folder: Path, args: Namespace) -> None:
    """Raise CheckpointError where stock fails late or not at all; on rank 0."""
    problems = [_untied(folder, args)]
    if not may_lack_weights(args.dist_ckpt_strictness):
        problems.append(other_experts(folder, _experts(args)))
    if found := [each for each in problems if each is not None]:
        raise CheckpointError(TITLE, found)


def _untied(folder: Path, args: Namespace) -> Problem | None:
    """An output layer that a tied model would leave out: its embedding takes its place."""
    try:
        has_head = _HEAD in opened(folder).sizes()
    except CheckpointError:  # of another kind, or unreadable: loading it says so
        return None
    if args.untie_embeddings_and_output_weights or not has_head:
        return None
    return Problem(
        where=str(folder),
        found=f"{_HEAD}, an output layer of its own",
        expected="a model whose output layer is its embedding, as the command's",
        remedy="Add --untie-embeddings-and-output-weights, or load another checkpoint.",
    )


def _experts(args: Namespace) -> SavedExperts | None:
    if args.num_experts is None:
        return None
    kinds = layers_with_experts(args.moe_layer_freq, args.num_layers)
    width = args.moe_ffn_hidden_size or args.ffn_hidden_size
    return SavedExperts.in_layers(kinds, args.num_experts, width)


@dataclass(frozen=True, kw_only=True)
class SavedState:
    """What a checkpoint has of an optimizer's state."""

    is_distributed: bool = True
    """Whether it is that of --use-distributed-optimizer."""
    has_main: bool = True
    """Whether it has main parameters. A job in fp32 saves none: its weights are the same."""

    @classmethod
    def of(cls, folder: Path) -> Self:
        """Read it of an iteration's folder; on rank 0."""
        try:
            found = opened(folder)
        except CheckpointError:  # of another kind, or unreadable: loading it says so
            return cls()
        is_distributed = found.has("optimizer.state.param.")
        has_main = is_distributed or found.has("optimizer.state.fp32_param.")
        return cls(is_distributed=is_distributed, has_main=has_main)

    @contextmanager
    def told(self, optimizer: Any) -> Iterator[None]:
        """Let the optimizer and stock know while it is loaded: of a checkpoint without the flag
        stock would ask how its state is sharded, and fail."""
        from megatron.training import get_args  # where a checkpoint is loaded it has been imported

        from zorse_megatron.adapter.groups.global_groups import presented

        for each in getattr(optimizer, "chained_optimizers", ()):
            each.finds_main = self.has_main
        is_distributed = get_args().use_distributed_optimizer and self.is_distributed
        with presented(get_args(), use_distributed_optimizer=is_distributed):
            yield


def brings_all_weights(chosen: Checkpoint | None, args: Namespace) -> bool:
    """Whether no parameter keeps its initial value: there is a checkpoint, and it must have all."""
    return chosen is not None and not may_lack_weights(args.dist_ckpt_strictness)


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


def load_hooks(folder: Path | None) -> Replacements:
    """What loads the optimizer's state of an iteration's folder, if any; a collective call."""
    state = SavedState() if folder is None else on_rank_0(partial(SavedState.of, folder))
    return {"load_checkpoint": partial(_make_load, state)}


def _make_load(state: SavedState, stock_load: Callable[..., Any]) -> Callable[..., Any]:
    def load_checkpoint(models: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            with same_schedule(), state.told(optimizer):
                return stock_load(models, optimizer, *args, **kwargs)
        except SystemExit as request:
            raise CheckpointError.of(
                TITLE,
                where="--load",
                found=f"that Megatron ended the job with status {request.code or 0}",
                expected="a checkpoint that can be loaded",
                remedy="The lines above say why.",
            ) from request
        except (Exception, CheckpointException) as error:
            if not _is_about_content(error):
                raise
            traceback.print_exc()
            raise _unreadable(error) from error

    return load_checkpoint


def _is_about_content(error: BaseException) -> bool:
    """Whether another start would meet the same error: it is not about a rank, a disk or a GPU."""
    if isinstance(error, CheckpointException):
        return all(_is_about_content(failure[0]) for failure in error.failures.values())
    transient = (ZorseError, OSError, MemoryError, torch.OutOfMemoryError, torch.AcceleratorError)
    return not isinstance(error, transient) and not is_communication_error(error)


def _unreadable(error: BaseException) -> CheckpointError:
    while isinstance(error, CheckpointException) and error.failures:
        error, _ = next(iter(error.failures.values()))  # of the first rank that failed
    line = next(iter(str(error).splitlines()), "")
    return CheckpointError.of(
        TITLE,
        where="--load",
        found=f"{type(error).__name__}: {line}",
        expected="a checkpoint that Megatron can load with this command",
        remedy="The traceback above says where. If the model is another one, correct the flags; "
        "else resume from an older checkpoint: zorse checkpoint verify lists them.",
    )


# All ranks load the checkpoint that rank 0 has chosen, whatever the tracker file says to each.
#
# Stock lets every rank read the tracker file, and takes the highest iteration that one of them
# finds. Where rank 0 has just set the tracker back, another node may still see it as it was (NFS
# keeps what it has read for a while), and all ranks would load what was found to be damaged.


def same_on_all(args: Namespace, load: Load | None, chosen: Checkpoint | None) -> Replacements:
    """Set `--ckpt-step`, and return what keeps ranks from reading tracker files.

    `chosen`: the same on all ranks; None: there is nothing to load.
    """
    if load is None or chosen is None:
        return {}
    if not chosen.is_release and args.ckpt_step is None:
        args.ckpt_step = chosen.iteration  # also where this rank sees no tracker file
    tracker = chosen.iteration, chosen.is_release
    return {"read_tracker": lambda _stock: lambda *_args, **_kwargs: tracker}


# Has the checkpoint the command's schedules of learning rate and weight decay?
#
# Stock stops at the first value that differs, with an assertion on every rank.


_REMEDY = (
    "Add --override-opt-param-scheduler to go on with the command's schedule, as with more "
    "--train-iters, or --use-checkpoint-opt-param-scheduler to keep the checkpoint's."
)


@contextmanager
def same_schedule() -> Iterator[None]:
    """While a checkpoint is loaded. Raises CheckpointError with all values that differ."""
    ours: dict[str, Any] = {}
    saved: dict[str, Any] = {}
    with REGISTRY.applied({"check_schedule": partial(_noting, ours, saved)}):
        yield
    if saved:
        from megatron.training import get_args  # where a checkpoint is loaded it has been imported

        args = get_args()
        raise CheckpointError.of(
            TITLE,
            where=f"--load {args.load}",
            found=f"{_listed(saved, args)} in the checkpoint",
            expected=f"{_listed(ours, args)}, as in the command",
            remedy=_REMEDY,
        )


def _noting(
    ours: dict[str, Any], saved: dict[str, Any], stock: Callable[..., Any]
) -> Callable[..., Any]:
    def _check_and_set(self: Any, cls_value: Any, sd_value: Any, name: str) -> Any:
        is_chosen = self.override_opt_param_scheduler or self.use_checkpoint_opt_param_scheduler
        if is_chosen or cls_value == sd_value:
            return stock(self, cls_value, sd_value, name)
        ours[name], saved[name] = cls_value, sd_value
        return cls_value

    return _check_and_set


def _listed(values: Mapping[str, Any], args: Any) -> str:
    # What stock calls iterations are samples.
    samples = args.global_batch_size if args.train_iters else 1
    scaled = {
        name: value / samples if name.endswith("iterations") else value
        for name, value in values.items()
    }
    return ", ".join(
        f"{name} {value if isinstance(value, str) else format(value, '.12g')}"
        for name, value in scaled.items()
    )


# All ranks read a checkpoint's files together: each file once, by one rank.
#
# A rank may have much more to read than another one. So that no collective call waits for longer
# than its timeout, all ranks exchange their progress after each part.


_BYTES_BETWEEN_EXCHANGES = 1 << 30
_PROGRESS_INTERVAL_S = 10.0


def read_together(
    folder: Path, names: Sequence[str], algorithm: str, *, total_bytes: int | None = None
) -> dict[str, FileRecord | None]:
    """Read `names`, this rank's share of a checkpoint; a collective call of all ranks.

    Returns file -> what it is, None for one that is missing. `total_bytes`: of all ranks; with it,
    rank 0 says how far they are. Raises OSError on every rank if one cannot read.
    """
    hashings = {name: Hashing(folder / name, algorithm) for name in names}
    missing: set[str] = set()
    pieces = _pieces(hashings, missing)
    num_bytes, failure, is_done = 0, None, False
    last_said_s = time.monotonic()
    while True:
        try:
            count, is_done = _some(pieces)
            num_bytes += count
        except OSError as error:
            failure = (error.errno, error.strerror, str(error.filename or folder))
        everyone = gathered((is_done, num_bytes, failure))
        failures = [each[2] for each in everyone if each[2] is not None]
        if failures:
            raise OSError(*failures[0])
        if all(each[0] for each in everyone):
            break
        if total_bytes is not None and time.monotonic() - last_said_s > _PROGRESS_INTERVAL_S:
            last_said_s = time.monotonic()
            read_bytes = sum(each[1] for each in everyone)
            say(f"{folder}: {read_bytes / 1e9:.1f} of {total_bytes / 1e9:.1f} GB are checked")
    return {
        name: None if name in missing else hashing.record() for name, hashing in hashings.items()
    }


def _pieces(hashings: dict[str, Hashing], missing: set[str]) -> Iterator[int]:
    for name, hashing in hashings.items():
        try:
            yield from hashing.pieces()
        except FileNotFoundError:
            missing.add(name)


def _some(pieces: Iterator[int]) -> tuple[int, bool]:
    """Read until the next exchange; returns bytes, and whether nothing is left."""
    num_bytes = 0
    for count in pieces:
        num_bytes += count
        if num_bytes >= _BYTES_BETWEEN_EXCHANGES:
            return num_bytes, False
    return num_bytes, True
