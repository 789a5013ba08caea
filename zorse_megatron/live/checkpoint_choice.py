"""Which checkpoint training resumes from, by stock's rules; and which other if it is not whole.

Sources of the rules: `load_checkpoint` and `_load_base_checkpoint`
in `megatron.training.checkpointing`. Stock reads the tracker files itself, so that going back to an
older checkpoint is to set the tracker back to it. No checkpoint is deleted or changed.
"""

import contextlib
import re
from argparse import Namespace
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from zorse_megatron.errors import CheckpointError, Problem
from zorse_megatron.live.checkpoint_check import (
    Look,
    MetadataError,
    State,
    look_at,
    tensor_shapes,
)
from zorse_megatron.live.checkpoint_files import (
    TRACKER,
    Checkpoint,
    Tracker,
    checkpoints_in,
    read_tracker,
    set_tracker,
)
from zorse_megatron.plan.spans import spans_of, spell

TITLE = "The checkpoint cannot be loaded"
SKIP = "--zorse-damaged-checkpoint skip"


@dataclass(frozen=True, kw_only=True)
class Load:
    """What the command says about loading."""

    root: Path | None
    """`--load`."""
    step: int | None = None
    """`--ckpt-step`."""
    pretrained: Path | None = None
    """`--pretrained-checkpoint`, used where `root` has no checkpoint."""
    is_needed: bool = False
    """`--exit-on-missing-checkpoint`."""
    skips_damaged: bool = False
    """Go back to an older checkpoint; the roots are those of `--save`, too."""

    @classmethod
    def of(cls, args: Namespace, *, skips_damaged: bool = False) -> Self:
        """By Megatron's arguments."""
        pretrained = args.pretrained_checkpoint
        return cls(
            root=None if args.load is None else Path(args.load),
            step=args.ckpt_step,
            pretrained=None if pretrained is None else Path(pretrained),
            is_needed=args.exit_on_missing_checkpoint,
            skips_damaged=skips_damaged,
        )

    @property
    def of_base(self) -> Self:
        """The part of it that is about the base of adapters, whose checkpoints lack it."""
        return replace(self, root=None, step=None, is_needed=False, skips_damaged=False)


class Chooser:
    """Finds the checkpoint to load; who finds that it is not whole rejects it and asks again."""

    def __init__(self, load: Load) -> None:
        self.load = load
        self.rejected: dict[Checkpoint, tuple[Problem, ...]] = {}
        self.notes: list[str] = []
        """Lines for the user, in their order."""

    def reject(self, checkpoint: Checkpoint, problems: Sequence[Problem]) -> None:
        """Note that a checkpoint is not whole."""
        self.rejected[checkpoint] = tuple(problems)

    def choose(self) -> Look | None:
        """Return the checkpoint that stock will load; None: training starts from the beginning.

        Raises CheckpointError where that one is not whole and no other one may take its place,
        OSError.
        """
        load = self.load
        found = None if load.root is None else self._in_root(load.root, step=load.step)
        if found is None and load.pretrained is not None:
            return self._pretrained(load.pretrained)
        if found is None and load.is_needed:
            raise CheckpointError.of(
                TITLE,
                where=str(load.root),
                found="no checkpoint",
                expected="one, as --exit-on-missing-checkpoint says",
                remedy="Correct --load, or leave the flag out to train from the beginning.",
            )
        return found

    def _in_root(self, root: Path, *, step: int | None) -> Look | None:
        """The checkpoint to load from one folder of `--save`."""
        tracker = read_tracker(root)
        wanted = tracker.names
        needs_no_tracker = not tracker.exists and self.load.pretrained is None
        if step and (wanted is not None or needs_no_tracker):
            wanted = Checkpoint(root=root, iteration=step) if wanted is None else wanted
            wanted = replace(wanted, iteration=step)
        if wanted is None and not tracker.exists:
            return self._without_tracker(tracker, root)
        if wanted is None:
            return self._go_back(root, [bad_tracker(tracker)], below=None)
        look = self._look(wanted)
        if look.is_usable:
            return look
        below = None if wanted.is_release else wanted.iteration
        return self._go_back(root, look.problems, below=below, is_asked_for=bool(step))

    def _without_tracker(self, tracker: Tracker, root: Path) -> Look | None:
        other, _ = self._newest_usable(root, below=None)
        if other is not None:
            return self._go_back(root, [bad_tracker(tracker)], below=None)
        if incomplete := checkpoints_in(root):
            listed = ", ".join(str(each.iteration) for each in incomplete)
            self.notes.append(
                f"no checkpoint in {root} is whole, and none was ever the latest (iterations "
                f"{listed}: cut short): training starts from the beginning"
            )
        return None

    def _go_back(
        self,
        root: Path,
        problems: Sequence[Problem],
        *,
        below: int | None,
        is_asked_for: bool = False,
    ) -> Look:
        """Set the tracker back to the newest whole checkpoint; or stop."""
        other, passed = self._newest_usable(root, below=below)
        if is_asked_for or not self.load.skips_damaged:
            raise CheckpointError(TITLE, _with_way_out(problems, root, other, self.load))
        problems = (*problems, *passed)
        if other is None:
            raise CheckpointError(TITLE, _with_way_out(problems, root, None, self.load))
        set_tracker(other.checkpoint)
        self.notes += [f"skips a damaged checkpoint: {problem}" for problem in problems]
        self.notes.append(
            f"{root}: goes back to {other.checkpoint}, and its tracker file says so now"
        )
        return other

    def _newest_usable(
        self, root: Path, *, below: int | None
    ) -> tuple[Look | None, tuple[Problem, ...]]:
        """The newest checkpoint that training could resume from; and why not a newer one."""
        passed: list[Problem] = []
        for checkpoint in checkpoints_in(root):
            if below is None or checkpoint.iteration < below:
                look = self._look(checkpoint)
                if look.is_usable:
                    return look, tuple(passed)
                passed += look.problems
        return None, tuple(passed)

    def _look(self, checkpoint: Checkpoint) -> Look:
        if checkpoint in self.rejected:
            return Look(
                checkpoint=checkpoint,
                state=State.DAMAGED,
                problems=self.rejected[checkpoint],
            )
        return look_at(checkpoint)

    def _pretrained(self, root: Path) -> Look:
        """Where stock fine-tunes from; never one that it would not have taken."""
        tracker = read_tracker(root)
        if tracker.names is None:
            raise CheckpointError(TITLE, [bad_tracker(tracker)])
        step = self.load.step or tracker.names.iteration
        look = self._look(replace(tracker.names, iteration=step))
        if not look.is_usable:
            raise CheckpointError(TITLE, look.problems)
        return look


def bad_tracker(tracker: Tracker) -> Problem:
    """What is wrong with a tracker file that names no checkpoint, or is missing."""
    return Problem(
        where=str(tracker.path),
        found=tracker.found,
        expected='the number of the latest checkpoint\'s iteration, or "release"',
        remedy="A save that was cut short may leave it so.",
    )


def _with_way_out(
    problems: Sequence[Problem], root: Path, other: Look | None, load: Load
) -> tuple[Problem, ...]:
    """The problems, the last of which says what else training can resume from."""
    if other is None:
        way_out = (
            f"No other checkpoint in {root} is whole: restore one from a copy, or train from the "
            "beginning with another --save."
        )
    else:
        number = other.checkpoint.iteration
        how = f"echo {number} > {root / TRACKER}, or start with {SKIP}"
        way_out = (
            f"The newest other one that has all of its bytes is iteration {number}; to resume from "
            f"there: {f'--ckpt-step {number}' if load.step else how}."
        )
    *others, last = problems
    return (*others, replace(last, remedy=f"{last.remedy} {way_out}"))


# What a checkpoint has of experts. Stock compares sizes as it loads, when all GPUs are held, and
# names one tensor.

_MLP = re.compile(r"decoder\.layers(?:\.(\d+))?\.mlp\.(experts\.experts\.)?linear_fc2\.weight")


@dataclass(frozen=True, kw_only=True)
class SavedExperts:
    """The experts of a model."""

    num_experts: int
    ffn_hidden_size: int
    """Width of one."""
    layers: tuple[int, ...]
    """Those that have them."""

    def __str__(self) -> str:
        where = spell(spans_of(self.layers))
        return f"{self.num_experts} experts of width {self.ffn_hidden_size} in layers {where}"

    @classmethod
    def in_layers(cls, kinds: Iterable[int], num_experts: int, ffn_hidden_size: int) -> Self:
        """`kinds`: layer -> whether it has experts."""
        layers = tuple(layer for layer, has_experts in enumerate(kinds) if has_experts)
        return cls(num_experts=num_experts, ffn_hidden_size=ffn_hidden_size, layers=layers)

    @classmethod
    def of(cls, folder: Path) -> Self | None:
        """Those of an iteration's folder; None: all layers of its model are dense.

        Raises MetadataError, also where it has no such model, OSError.
        """
        shapes = tensor_shapes(folder)
        found = {match: shapes[name] for name in shapes if (match := _MLP.fullmatch(name))}
        experts = {match[1]: shape for match, shape in found.items() if match[2]}
        if not experts and found and not any(".mlp.experts." in name for name in shapes):
            return None
        if len({shape[-3:] for shape in experts.values() if len(shape) >= _AXES}) != 1:
            raise MetadataError("it has no experts, or not as Megatron saves them")
        *stacked, number, _, width = next(iter(experts.values()))
        layers = range(stacked[0]) if stacked else sorted(map(int, experts))
        return cls(num_experts=number, ffn_hidden_size=width, layers=tuple(layers))


_AXES = 3
"""Experts of a layer, the residual stream, the width of one."""


def may_lack_weights(strictness: str) -> bool:
    """Whether a checkpoint may lack what a model has, by --dist-ckpt-strictness."""
    return strictness.startswith(("log_", "return_", "ignore_"))


def other_experts(folder: Path, expected: SavedExperts | None) -> Problem | None:
    """What an iteration's folder has of experts, unless a model has the same.

    None also where it is of another kind or cannot be read: loading it says so.
    """
    try:
        found = SavedExperts.of(folder)
    except (OSError, MetadataError):
        return None
    if found == expected:
        return None
    return Problem(
        where=str(folder),
        found=str(found or "no experts"),
        expected=f"{expected or 'no experts'}, as the command has",
        remedy="Give the flags of the model that was saved, or load another checkpoint.",
    )


# What a job has saved, for those who decide how it goes on.


def newest_saved(save: str | None) -> int | None:
    """Return the iteration of the newest checkpoint that is complete by names and sizes.

    `save`: the folder of `--save`. None: there is none, or the folder cannot be read.
    """
    look = newest_whole(save)
    return None if look is None else look.checkpoint.iteration


def newest_whole(save: str | None) -> Look | None:
    """The same, with all that names and sizes say of it."""
    with contextlib.suppress(OSError):
        for checkpoint in checkpoints_in(Path(save)) if save is not None else ():
            if (look := look_at(checkpoint)).is_usable:
                return look
    return None


def what_is_saved(iteration: int | None) -> str:
    """What training can go on from, in a sentence."""
    if iteration is None:
        return "No checkpoint has been saved."
    return f"The checkpoint of iteration {iteration} is complete."
