"""Suggest a known name for a mistyped one."""

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a remedy for an unknown name: the closest known one, or all of them."""
    by_lower = {each.lower(): each for each in known}
    close = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.5)
    if close:
        return f'Did you mean "{by_lower[close[0]]}"?'
    return f"Known are {', '.join(sorted(by_lower.values()))}." if by_lower else "None is defined."
