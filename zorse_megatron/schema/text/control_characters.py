"""Characters that no name has: they would steer the terminal, or read as other text than there is.

C0 and C1 controls (escape sequences begin with one), line and paragraph separators, and the signs
that turn the direction of writing (Unicode Standard Annex 9).
"""

import re
from collections.abc import Iterator
from typing import Any

from zorse_megatron.errors import Problem

_CONTROLS = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


def control_problems(value: Any, path: str = "") -> Iterator[Problem]:
    """Yield where a text among JSON values has such a character."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from control_problems(item, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from control_problems(item, f"{path}[{index}]")
    elif isinstance(value, str) and (control := _CONTROLS.search(value)):
        yield Problem(
            where=path or "top level",
            found=f"a control character (U+{ord(control[0]):04X}) in {value!a}",
            expected="text that can be printed",
            remedy="Remove it.",
        )
