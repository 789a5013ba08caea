"""Checkpoints of a run that trains adapters alone (`--zorse-lora`).

`--save` and `--load` have the adapters, and the optimizer's state of them; they say which base they
are for. The base, which no run changes, comes from `--pretrained-checkpoint` at every start.
"""

from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from zorse_megatron.adapter.checkpoint.before_load import (
    brings_all_weights,
    check_before_load,
    load_hooks,
    load_of,
    refuse_other_model,
    same_on_all,
)
from zorse_megatron.adapter.groups.global_groups import presented
from zorse_megatron.adapter.patches.rebind import REGISTRY, Replacements
from zorse_megatron.errors import CheckpointError, Problem
from zorse_megatron.inputs.lora import ARGUMENT, LORA_FLAG, RANDOM_BASE, Lora, is_adapter
from zorse_megatron.live.checkpoint_choice import TITLE, Chooser, Load, newest_whole
from zorse_megatron.live.checkpoint_files import Checkpoint, read_tracker
from zorse_megatron.log import say
from zorse_megatron.runtime.collectives import on_rank_0
from zorse_megatron.weights.opened import argument_in, base_digest

_LOAD, _BASE = "--load", "--pretrained-checkpoint"


@dataclass(frozen=True, kw_only=True)
class _Found:
    """A checkpoint that this run loads, and what the command says about loading it."""

    load: Load
    checkpoint: Checkpoint


class AdapterRun:
    """Which adapters a run trains, and which checkpoints it starts from."""

    def __init__(
        self, lora: Lora, args: Namespace, *, skips_damaged: bool, has_moved: bool
    ) -> None:
        """Find and check the checkpoints; a collective call.

        `has_moved`: the adapters are there, from the plan before. Lets `args` say in
        checkpoints what the adapters are. Raises CheckpointError where one is damaged, or the
        adapters are other ones, or for another base.
        """
        self.lora = lora
        self._loads_base = False
        _refuse_remote(args)
        load = load_of(args, skips_damaged=skips_damaged)
        self._base = self._own = None
        if load is not None and load.pretrained is not None:
            self._base = _found(load.of_base)
            if self._base is not None:
                on_rank_0(partial(refuse_other_model, self._base.checkpoint.folder, args))
        if self._base is None:
            say(f"there is no {_BASE}: the adapters are trained beside random weights")
        args.zorse_lora = described = self._described(args.seed)
        if load is not None and load.root is not None and not has_moved:
            self._own = self._found_own(load, load.root, described)
        say(f"adapters alone are trained: {lora}; base {described['base'][:16]}")

    def _found_own(self, load: Load, root: Path, described: Mapping[str, Any]) -> "_Found | None":
        """The adapters to go on from; None: this is the job's first start."""
        is_needed = load.is_needed and self._base is None
        own = replace(load, pretrained=None, is_needed=is_needed)
        if not is_needed and not read_tracker(root).exists:
            own = replace(own, step=None)  # it is for later starts
        newest = on_rank_0(partial(newest_whole, str(root)))
        if newest is not None:  # before the tracker is set back from what is damaged
            _refuse_others(newest.checkpoint.folder, described)
        found = _found(own)
        if found is not None:
            _refuse_others(found.checkpoint.folder, described)
        return found

    def _described(self, seed: int) -> dict[str, Any]:
        """What checkpoints say of the adapters."""
        base = f"{RANDOM_BASE}{seed}"
        if self._base is not None:
            base = on_rank_0(partial(base_digest, self._base.checkpoint.folder))
        lora = self.lora
        return {
            "rank": lora.rank,
            "alpha": lora.alpha,
            "targets": list(lora.targets),
            "base": base,
        }

    def brings_base(self, args: Namespace) -> bool:
        """Whether no frozen parameter keeps its initial value."""
        return brings_all_weights(None if self._base is None else self._base.checkpoint, args)

    def part_of(self, entries: Mapping[str, Any]) -> dict[str, Any]:
        """What is saved or loaded now of a chunk's sharded state dict."""
        return {
            name: entry for name, entry in entries.items() if is_adapter(name) != self._loads_base
        }

    def hooks(self, args: Namespace) -> Replacements:
        """What loads the base, and then the adapters."""
        return {"load_checkpoint": partial(self._loading, args)}

    def _loading(self, args: Namespace, stock: Callable[..., Any]) -> Callable[..., Any]:
        folder = None if self._own is None else self._own.checkpoint.folder
        load = load_hooks(folder)["load_checkpoint"](stock)

        def load_checkpoint(*given: Any, **named: Any) -> Any:
            result = 0, 0
            if self._base is not None:
                with (
                    presented(self, _loads_base=True),
                    _presented(args, self._base, load=None, ckpt_step=None, finetune=True),
                ):
                    load(*given, **named)
            if self._own is not None:
                with _presented(args, self._own, pretrained_checkpoint=None):
                    result = load(*given, **named)
            return result

        return load_checkpoint


def _refuse_remote(args: Namespace) -> None:
    """Raise CheckpointError for what is not in files: nothing could be told of it."""
    roots = {_LOAD: args.load, _BASE: args.pretrained_checkpoint}
    problems = [
        Problem(
            where=f"{flag} {root}",
            found="what is not in files",
            expected=f"a directory, with {LORA_FLAG}: the base is known by its weights",
            remedy="Copy it to a file system that all nodes see.",
        )
        for flag, root in roots.items()
        if root is not None and "://" in root
    ]
    if problems:
        raise CheckpointError(TITLE, problems)


def base_problems(args: Namespace) -> Iterator[Problem]:
    """Yield what keeps a run from loading its base once more; for one rank."""
    load = load_of(args, skips_damaged=False)
    if load is None or load.pretrained is None:
        return
    try:
        look = Chooser(load.of_base).choose()
        digest = None if look is None else base_digest(look.checkpoint.folder)
    except CheckpointError as error:
        yield from error.problems
        return
    if digest != args.zorse_lora["base"]:
        yield Problem(
            where=f"{_BASE} {load.pretrained}",
            found="other weights than at the start",
            expected="those that the adapters are trained beside",
            remedy="Let nothing write there; start the next plan as a job of its own.",
        )


def refuse_adapters(folder: Path) -> None:
    """Raise CheckpointError if a folder that is to be loaded whole has adapters alone."""
    try:
        saved = argument_in(folder, ARGUMENT)
    except CheckpointError:  # a checkpoint of another kind
        return
    if saved is not None:
        raise CheckpointError.of(
            TITLE,
            where=f"{_LOAD} {folder}",
            found="adapters alone",
            expected=f"whole weights, or {LORA_FLAG} in the command",
            remedy=f"Add {LORA_FLAG} as the run that saved it had it, and its base ({_BASE}).",
        )


def _found(load: Load) -> _Found | None:
    checkpoint = check_before_load(load)
    return None if checkpoint is None else _Found(load=load, checkpoint=checkpoint)


@contextmanager
def _presented(args: Namespace, found: _Found, **values: Any) -> Iterator[None]:
    """Let the arguments name one checkpoint, as if the other were none."""
    with (
        presented(args, **{"ckpt_step": args.ckpt_step, **values}),
        REGISTRY.applied(same_on_all(args, found.load, found.checkpoint)),
    ):
        yield


def _refuse_others(folder: Path, described: Mapping[str, Any]) -> None:
    """Raise CheckpointError for other adapters, or for another base; a collective call."""
    saved = on_rank_0(partial(argument_in, folder, ARGUMENT))
    if problems := list(_differences(str(folder), saved, described)):
        raise CheckpointError(TITLE, problems)


def _differences(
    where: str, saved: Mapping[str, Any] | None, ours: Mapping[str, Any]
) -> Iterator[Problem]:
    if saved is None:
        yield Problem(
            where=f"{_LOAD} {where}",
            found="whole weights",
            expected=f"adapters, as {LORA_FLAG} trains",
            remedy=f"Give the base with {_BASE}, and with {_LOAD} what such a run has saved.",
        )
        return
    for name in ("rank", "alpha", "targets"):
        if saved[name] != ours[name]:
            yield Problem(
                where=f"{_LOAD} {where}",
                found=f"adapters with {name} {_text(saved[name])}",
                expected=f"{_text(ours[name])}, as {LORA_FLAG} says",
                remedy="Use the flag that they were saved with, or another --save and --load.",
            )
    if saved["base"] != ours["base"]:
        yield Problem(
            where=f"{_LOAD} {where}",
            found=f"adapters for the base {saved['base'][:16]}",
            expected=f"the base of this run, {ours['base'][:16]}",
            remedy=f"Give the base that they were trained on ({_BASE}).",
        )


def _text(value: Any) -> str:
    return ",".join(value) if isinstance(value, list) else repr(value).removesuffix(".0")
