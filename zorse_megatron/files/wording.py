"""How answers and errors spell counts and figures, suggest a name, and refuse odd characters."""

import difflib
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from zorse_megatron.errors import Problem

_SECONDS = (
    (86_400.0, 172_800.0, "days"),
    (3_600.0, 36_000.0, "h"),
    (60.0, 1_000.0, "min"),
    (1.0, 1.0, "s"),
    (1e-3, 1e-3, "ms"),
    (1e-6, 1e-6, "us"),
)
"""(length of the unit, from where on it is used, its name), longest first."""
NO_CHANGE = 1e-3
"""Shares below are told as none."""
_TIMES = 2.0  # ratios above are told as such
_BYTES = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def figure(value: float) -> str:
    """A number with three significant digits.

    >>> figure(17689), figure(74.46), figure(0.001852), figure(999.6), figure(0)
    ('17,700', '74.5', '0.00185', '1,000', '0')
    """
    rounded = _rounded(value)
    if rounded == 0:
        return "0"
    return f"{rounded:,.0f}" if abs(rounded) >= 1000 else f"{rounded:#.3g}".rstrip(".")


def duration(seconds: float) -> str:
    """A time in the unit that suits it; never 0 for what takes any.

    >>> duration(1.8523), duration(0.00291), duration(2.4e-5), duration(0), duration(7200)
    ('1.85 s', '2.91 ms', '24.0 us', '0 s', '120 min')
    >>> duration(1e-9), duration(0.99996), duration(1e6)
    ('0.00100 us', '1.00 s', '11.6 days')
    """
    rounded = _rounded(seconds)
    for length, least, unit in _SECONDS:
        if abs(rounded) >= least:
            return f"{figure(rounded / length)} {unit}"
    return f"{figure(rounded / 1e-6)} us" if rounded else "0 s"


def memory(num_bytes: float) -> str:
    """Memory in the unit of drivers (data sheets say GB = 10⁹ bytes).

    >>> memory(48e9), memory(816_000_000), memory(0), memory(2**40)
    ('44.7 GiB', '778 MiB', '0 GiB', '1,020 GiB')
    """
    for size, unit in _BYTES:
        if abs(num_bytes) >= size:
            return f"{figure(num_bytes / size)} {unit}"
    return f"{num_bytes:.0f} B" if num_bytes else "0 GiB"


def part_of(num_bytes: float, capacity_bytes: float) -> str:
    """Memory for people, and how much that is of what there is.

    >>> part_of(24e9, 48e9), part_of(48e6, 48e9)
    ('22.4 GiB, 50 %', '45.8 MiB, 0.1 %')
    """
    share = 100 * num_bytes / capacity_bytes
    return f"{memory(num_bytes)}, {share:{'.0f' if share >= 1 else '.1g'}} %"


def percent(share: float) -> str:
    """A share in percent, whole ones from ten on.

    >>> percent(0.654), percent(0.0123), percent(0.00004), percent(0)
    ('65 %', '1.2 %', '0.004 %', '0 %')
    """
    value = 100 * share
    if abs(value) >= 10 or not value:
        return f"{value:.0f} %"
    return f"{value:.1f} %" if abs(value) >= 0.1 else f"{value:.1g} %"


def as_against(found_s: float, iteration_s: float) -> str:
    """For people: how much longer.

    >>> as_against(6.98, 6.63), as_against(10.9, 6.63), as_against(6.8, 6.98), as_against(1.0, 1.0)
    ('5.3 % longer', '64 % longer', '2.6 % shorter', 'as long')
    """
    ratio = found_s / iteration_s
    if abs(ratio - 1) <= NO_CHANGE:
        return "as long"
    if ratio > _TIMES:
        return f"{figure(ratio)} x as long"
    return f"{percent(abs(ratio - 1))} {'longer' if ratio > 1 else 'shorter'}"


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")


# Counts with their nouns.


def number_of(count: int, noun: str, plural: str = "") -> str:
    """A number with its noun in the right form.

    >>> number_of(1, "layer"), number_of(12000, "layer"), number_of(2, "series", "series")
    ('1 layer', '12000 layers', '2 series')
    """
    return f"{count} {noun if count == 1 else plural or noun + 's'}"


# Suggest a known name for a mistyped one.


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a remedy for an unknown name: the closest known one, or all of them."""
    by_lower = {each.lower(): each for each in known}
    close = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.5)
    if close:
        return f'Did you mean "{by_lower[close[0]]}"?'
    return f"Known are {', '.join(sorted(by_lower.values()))}." if by_lower else "None is defined."


def repeated(names: Iterable[str], where: str, noun: str, remedy: str) -> Iterator[Problem]:
    """Yield a Problem for each name that comes more than once; `noun`: of what it names."""
    for name, count in Counter(names).items():
        if count > 1:
            yield Problem(
                where=where,
                found=f'{count} entries with the name "{name}"',
                expected=f"a different name for every {noun}",
                remedy=remedy,
            )


# Characters that no name has: they would steer the terminal, or read as other text than there is.
#
# C0 and C1 controls (escape sequences begin with one), line and paragraph separators, and the signs
# that turn the direction of writing (Unicode Standard Annex 9).


_CONTROLS = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


def one_line(text: str) -> str:
    """A text as files take it: on one line, without such characters.

    >>> one_line("no plan fits (1 problem):\\n  1. \x1b[1mgroups: found none")
    'no plan fits (1 problem): 1. [1mgroups: found none'
    """
    known = text.encode("utf-8", "replace").decode()
    return " ".join(_CONTROLS.sub(" ", known).split())


def control_problems(value: Any, path: str = "", *, lines: bool = False) -> Iterator[Problem]:
    """Yield where a text among JSON values has such a character.

    `lines`: whether texts may have tabs, and ends of lines.
    """
    if isinstance(value, dict):
        for key, item in value.items():
            yield from control_problems(item, f"{path}.{key}" if path else key, lines=lines)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from control_problems(item, f"{path}[{index}]", lines=lines)
    elif isinstance(value, str) and (
        control := _CONTROLS.search(re.sub(r"[\t\n]", "", value) if lines else value)
    ):
        yield Problem(
            where=path or "top level",
            found=f"a control character (U+{ord(control[0]):04X}) in {value!a}",
            expected="text that can be printed",
            remedy="Remove it.",
        )
