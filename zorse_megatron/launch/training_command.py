"""The training command as every rank runs it: the user's own, the plan, and what resuming needs."""

import os
import os.path
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from zorse_megatron.errors import LaunchError, Problem
from zorse_megatron.flags.command import last_values

MODULE = "zorse_megatron.pretrain"
_DAMAGED = "--zorse-damaged-checkpoint"
_ADDED = ("--zorse-plan", "--zorse-cluster")
_HANDLER = "--exit-signal-handler"
_READ = (*_ADDED, _DAMAGED, "--save", "--load", _HANDLER)


@dataclass(frozen=True, kw_only=True)
class TrainingCommand:
    """What every rank runs."""

    words: tuple[str, ...]
    """After `python -m MODULE`, or after `python`: a script, if there is one, and flags."""
    resumes: bool
    """Whether it resumes from its own checkpoint when it is started again."""
    save: str | None = None
    """The folder of its checkpoints."""
    module: str | None = MODULE
    """None: the script itself is run, by torchrun."""
    variables: tuple[str, ...] = ()
    """Of its environment, `NAME=VALUE`."""

    @property
    def program(self) -> tuple[str, ...]:
        """All words of torchrun's after its options."""
        return (*(() if self.module is None else ("-m", self.module)), *self.words)

    def lines(self) -> list[str]:
        """Return the words for a shell: the script, then each flag with its values."""
        lines: list[str] = []
        for word in self.words:
            if word.startswith("--") or not lines:
                lines.append(shlex.quote(word))
            else:
                lines[-1] += f" {shlex.quote(word)}"
        return lines


def training_of(given: Sequence[str], *, plan: str, cluster: str | None) -> TrainingCommand:
    """Add the plan, and to a command that saves the flags with which it goes on when requeued.

    `given`: what follows `--`; `cluster`: the file that says which rank belongs to which
    node. Raises LaunchError for flags that contradict it.
    """
    values = last_values(given, _READ)
    problems = [*_problems(given, values), *folder_problems(given)]
    if problems:
        raise LaunchError("the training command cannot be launched", problems)
    ours = ["--zorse-plan", plan]
    if cluster is not None:
        ours += ["--zorse-cluster", cluster]
    more, save = resuming_flags(given)
    if save is not None and _DAMAGED not in values:
        more += (_DAMAGED, "skip")
    return TrainingCommand(words=(*given, *ours, *more), resumes=save is not None, save=save)


def resuming_flags(given: Sequence[str]) -> tuple[tuple[str, ...], str | None]:
    """Megatron's flags with which a command that saves goes on when requeued, and its folder."""
    values = last_values(given, _READ)
    save = values.get("--save")
    if save is None:
        return (), None
    load = () if "--load" in values else ("--load", save)
    return (*load, *(() if _HANDLER in values else (_HANDLER,))), save


def _problems(given: Sequence[str], values: Mapping[str, str | None]) -> Iterator[Problem]:
    if not given:
        yield Problem(
            where="--",
            found="no training command",
            expected="one after --, such as: -- pretrain_gpt.py --num-layers 32",
            remedy="Give the script and Megatron's flags, without torchrun or srun.",
        )
    for flag in _ADDED:
        if flag in values:
            yield Problem(
                where=flag,
                found="it in the training command",
                expected="zorse launch to add it",
                remedy="Leave it out.",
            )


def folder_problems(given: Sequence[str]) -> Iterator[Problem]:
    """Yield what is wrong with where a command saves and loads."""
    values = last_values(given, _READ)
    if "--save" not in values:
        return
    saves, loads = values["--save"], values.get("--load", values["--save"])
    if not saves:
        yield Problem(
            where="--save",
            found='"" after it',
            expected="a directory",
            remedy="Such as --save checkpoints.",
        )
    elif not _are_one(saves, loads or ""):
        yield Problem(
            where="--load",
            found=f"{loads or ''}, while --save says {saves}",
            expected="the same directory: a restarted job resumes from what it saved",
            remedy="Leave --load out; to start from another checkpoint, give it as "
            "--pretrained-checkpoint.",
        )


def _are_one(first: str, second: str) -> bool:
    """Whether two paths lead to one folder, as the ranks themselves ask before they load."""
    return os.path.realpath(first) == os.path.realpath(second)
