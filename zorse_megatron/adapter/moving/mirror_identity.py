"""Whose copies these are: of one run, however often it starts, and of no other one."""

import secrets
from argparse import Namespace
from collections.abc import Iterator
from os.path import realpath
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.training import get_args

from zorse_megatron.errors import FlagError, Problem, ZorseError
from zorse_megatron.files.write import write_text

RUN_FILE = "zorse-mirror-run"
"""In the folder of checkpoints: a name for the run that is gone when the folder is made anew."""
_FLAG = "--zorse-mirror"


def identity_and_start(
    command: tuple[str, ...], group: Any, *, begins: bool
) -> tuple[tuple[str, ...] | None, str]:
    """What tells this run from others, and a name for this start of it; from rank 0, on all ranks.

    `command`: the training's words but the plan's; `begins`: whether this may be the first start of
    a run, else None is returned for one. Raises FlagError for a command whose
    checkpoints and copies cannot be told apart by age.
    """
    args = get_args()
    if problems := list(_problems(args)):
        raise FlagError("State cannot be mirrored", problems)
    name: str | None = None
    problem = None
    if dist.get_rank() == 0:
        try:
            name = _run_name(Path(args.save), begins=begins)
        except (OSError, ZorseError) as error:
            problem = str(error)
    told: list[Any] = [name, realpath(args.save), problem, secrets.token_hex(8)]
    dist.broadcast_object_list(told, src=0, group=group)
    name, save, problem, start = told
    if problem is not None:
        raise FlagError("State cannot be mirrored", [_no_name(args.save, problem)])
    return None if name is None else (*command, save, name), start


def _run_name(save: Path, *, begins: bool) -> str | None:
    path = save / RUN_FILE
    if not path.is_file():
        if not begins:
            return None
        write_text(path, secrets.token_hex(16), parents=True)
    return path.read_text()


def _problems(args: Namespace) -> Iterator[Problem]:
    if not args.save or "://" in args.save:
        yield Problem(
            where=_FLAG,
            found=f"--save {args.save}" if args.save else "no --save",
            expected="--save with a directory, which copies belong to",
            remedy="Add --save DIR: where copies are lost, checkpoints are what is left.",
        )
    elif args.load is not None and realpath(args.load) != realpath(args.save):
        yield Problem(
            where="--load",
            found=f"{args.load}, while --save says {args.save}",
            expected=f"the same directory, with {_FLAG}: the newer of copy and checkpoint is taken",
            remedy="To start from another checkpoint, give it as --pretrained-checkpoint.",
        )
    for name in ("finetune", "no_load_optim"):
        if getattr(args, name, False):
            yield Problem(
                where=f"--{name.replace('_', '-')}",
                found=f"it beside {_FLAG}",
                expected="a run that goes on where it was: copies have all of its state",
                remedy="Leave one of them out.",
            )


def _no_name(save: str, error: str) -> Problem:
    return Problem(
        where=str(Path(save) / RUN_FILE),
        found=error,
        expected="a file that rank 0 can read, or write",
        remedy=f"Correct --save, or leave {_FLAG} out.",
    )
