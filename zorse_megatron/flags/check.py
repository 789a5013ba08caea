"""Checks a training command against its plan, or for planning, by the rows of `flags.yaml`.

The same rows check a command line that is read without Megatron (`check_command`: by check, launch
and the planning commands, and by a run before it imports torch) and the arguments that Megatron has
parsed (`check_arguments`), which may say more, as from a checkpoint.
"""

from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from inspect import signature
from types import MappingProxyType
from typing import Any

from zorse_megatron.errors import ClusterError, PlanError, Problem
from zorse_megatron.flags import conditions
from zorse_megatron.flags.command import Command, unknown_flags
from zorse_megatron.flags.conditions import Case, is_given, own_entry_trains
from zorse_megatron.flags.table import Row, defaults, further_rows, names_of, row_of, spelling_of
from zorse_megatron.gpus.gpu import GpuKind
from zorse_megatron.plan.plan import Plan

_NAMES = ("Adam", "Megatron", "Transformer", "MuP")


def check_command(
    command: Command,
    plan: Plan | None,
    kinds: Mapping[str, GpuKind] | None = None,
    *,
    world_size: int | None = None,
    is_whole: bool = False,
    by_stock: bool = False,
    lacks_plan: bool = False,
) -> list[Problem]:
    """Everything in a command that does not fit the plan, or any plan where there is none.

    `kinds`: of the cluster's GPUs, where they are known beyond the well-known ones. `world_size`:
    the ranks of a run that starts, else None; then flags that a script may add are left to its
    parser, which is asked later. `is_whole`: whether it is run as it is, and does not only say what
    is trained. `by_stock`: unmodified Megatron is to run it, which takes all of its own flags.
    `lacks_plan`: it has a plan, which cannot be used.
    """
    starts = world_size is not None
    case = Case(
        args=command.args,
        plan=plan,
        lacks_plan=lacks_plan,
        kinds=kinds,
        world_size=world_size,
        is_own_entry=command.script is None,
        is_whole=is_whole or starts,
        is_final=not starts,
    )
    unknown = () if starts and command.script is not None else unknown_flags(command)[0]
    return [*unknown, *command.problems, *_problems(case, by_stock=by_stock)]


@contextmanager
def naming_flags_too(
    command: Command | None, *, world_size: int | None = None, by_stock: bool = False
) -> Iterator[None]:
    """Where a plan proves unusable within the block, name in the same error the flags of its
    command that are refused under any plan. The others are as for `check_command`."""
    try:
        yield
    except (PlanError, ClusterError) as error:
        misfits = command and fitting_no_plan(command, world_size=world_size, by_stock=by_stock)
        if not misfits:
            raise
        problems = [*error.problems, *misfits]
        raise type(error)(f"{error.title}; the command fits no plan", problems) from error


def fitting_no_plan(
    command: Command, *, world_size: int | None = None, by_stock: bool = False
) -> list[Problem]:
    """Everything that these rows refuse in a command under any plan, where its own is unusable."""
    return check_command(
        command, None, world_size=world_size, by_stock=by_stock, is_whole=True, lacks_plan=True
    )


def check_arguments(
    args: Namespace,
    plan: Plan,
    kinds: Mapping[str, GpuKind] | None = None,
    *,
    world_size: int | None = None,
    again: bool = False,
) -> list[Problem]:
    """Everything in parsed arguments that does not fit the plan.

    `again`: Megatron has derived sizes and it is known which layers a rank has; only what depends
    on them is asked about.
    """
    case = Case(args=args, plan=plan, kinds=kinds, world_size=world_size, is_final=again)
    if again:
        return list(_further(case, (row for row in further_rows() if row.again)))
    return _problems(case)


def check_own_entry(args: Namespace) -> list[Problem]:
    """Every flag that is given and that our own GPT entry cannot honour."""
    case = Case(args=args, plan=None, is_own_entry=True)
    return list(_further(case, (r for r in further_rows() if r.when == own_entry_trains.__name__)))


def is_refused(name: str, value: Any) -> bool:
    """Whether this value of an argument is refused whatever the plan."""
    row = row_of()[name]
    several = value if isinstance(value, list) else [value]
    is_accepted = bool(several) and all(each in row.accepted for each in several)
    return row.refuses and is_given(name, value) and not is_accepted


def _problems(case: Case, *, by_stock: bool = False) -> list[Problem]:
    """By all rows; by those alone that stock's own commands breach, too."""
    if by_stock:
        return list(_further(case, (row for row in further_rows() if row.of_stock)))
    problems = [
        _problem(case, row, name)
        for name, row in row_of().items()
        if is_refused(name, getattr(case.args, name, None))
    ]
    for row in further_rows():
        told = {each.where for each in problems}
        is_own = row.when == own_entry_trains.__name__
        problems += [p for p in _further(case, [row]) if not (is_own and p.where in told)]
    return problems


def _further(case: Case, some: Iterable[Row]) -> Iterator[Problem]:
    """By rows that refuse a flag when something else holds."""
    for row in some:
        for name in names_of(row) if row.flags else [""]:
            for filled in _filled(case, row, name):
                yield _problem(case, row, name, filled)


def _filled(case: Case, row: Row, name: str) -> Iterable[Mapping[str, object]]:
    """What fills in the row's braces, once for each problem."""
    value = case.value(name)
    if row.values is not None and value not in row.values:
        return ()
    if row.accepted and (defaults().get(name) if value is None else value) in row.accepted:
        return ()
    if not case.has(row.beside):
        return ()
    if not row.when:
        return ({},)
    condition = getattr(conditions, row.when)
    if "plan" not in signature(condition).parameters:
        return condition(case, name)
    return () if case.plan is None else condition(case, case.plan, name)


def _problem(
    case: Case, row: Row, name: str, filled: Mapping[str, object] = MappingProxyType({})
) -> Problem:
    value = case.value(name)
    texts = {
        "flag": spelling_of(name),
        "value": value,
        "given": "the flag" if isinstance(value, bool) else repr(value),
        "what": _lowered(row.what),
        "accepted": " or ".join(map(str, row.accepted)) or "no such flag",
        **filled,
    }
    said = (row.where, row.found, row.expected, row.remedy)
    where, found, expected, remedy = (text.format_map(texts) for text in said)
    return Problem(where=where, found=found, expected=expected, remedy=remedy)


def _lowered(text: str) -> str:
    """A phrase in the middle of a sentence; abbreviations and names stay as they are."""
    is_word = text[1:2].islower() or text[1:2] == " "
    return text[:1].lower() + text[1:] if is_word and not text.startswith(_NAMES) else text
