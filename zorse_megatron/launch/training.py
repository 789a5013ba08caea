"""The training command as every rank runs it: the user's own, the plan, and what resuming needs."""

import os.path
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from zorse_megatron.errors import LaunchError, Problem

MODULE = "zorse_megatron.pretrain"
_DAMAGED = "--zorse-damaged-checkpoint"


@dataclass(frozen=True, kw_only=True)
class Training:
    """Words behind `python -m zorse_megatron.pretrain`."""

    words: tuple[str, ...]
    resumes: bool
    """Whether it goes on from its own checkpoint when it is started again."""
    save: str | None = None
    """The folder of its checkpoints."""

    def lines(self) -> list[str]:
        """Return the words for a shell: the script, then each flag with its values."""
        lines: list[str] = []
        for word in self.words:
            if word.startswith("--") or not lines:
                lines.append(shlex.quote(word))
            else:
                lines[-1] += f" {shlex.quote(word)}"
        return lines


def training_of(given: Sequence[str], *, plan: str, cluster: str | None) -> Training:
    """Add the plan, and to a command that saves the flags with which it goes on when requeued.

    `given`: what stands behind `--`; `cluster`: the file that says which rank belongs to which
    node. Raises LaunchError for flags that contradict it.
    """
    problems = list(_problems(given))
    if problems:
        raise LaunchError("the training command cannot be launched", problems)
    ours = ["--zorse-plan", plan]
    if cluster is not None:
        ours += ["--zorse-cluster", cluster]
    saves = _value(given, "--save")
    if saves is not None:
        if _value(given, "--load") is None:
            ours += ["--load", saves]
        if "--exit-signal-handler" not in given:
            ours.append("--exit-signal-handler")
        if _value(given, _DAMAGED) is None:
            ours += [_DAMAGED, "skip"]
    return Training(words=(*given, *ours), resumes=saves is not None, save=saves)


def _problems(given: Sequence[str]) -> Iterator[Problem]:
    if not given:
        yield Problem(
            where="--",
            found="no training command",
            expected="one after --, such as: -- pretrain_gpt.py --num-layers 32",
            remedy="Give the script and Megatron's flags, without torchrun or srun.",
        )
    for flag in ("--zorse-plan", "--zorse-cluster"):
        if _value(given, flag) is not None:
            yield Problem(
                where=flag,
                found="it in the training command",
                expected="zorse launch to add it",
                remedy="Leave it out.",
            )
    saves, loads = _value(given, "--save"), _value(given, "--load")
    if saves is not None and (not saves or saves.startswith("--")):
        yield Problem(
            where="--save",
            found=f'"{saves}" after it',
            expected="a directory",
            remedy="Such as --save checkpoints.",
        )
    elif saves is not None and loads is not None and not _are_one(saves, loads):
        yield Problem(
            where="--load",
            found=f"{loads}, while --save says {saves}",
            expected="the same directory: a restarted job resumes from what it saved",
            remedy="Leave --load out; to start from another checkpoint, give it as "
            "--pretrained-checkpoint.",
        )


def _are_one(first: str, second: str) -> bool:
    """Whether two paths lead to one folder, as the ranks themselves ask before they load."""
    return os.path.realpath(first) == os.path.realpath(second)


def _value(given: Sequence[str], flag: str) -> str | None:
    """The value of a flag; of one given twice the last."""
    found = None
    for word, following in pairwise((*given, "")):
        name, equals, value = word.partition("=")
        if name == flag:
            found = value if equals else following
    return found
