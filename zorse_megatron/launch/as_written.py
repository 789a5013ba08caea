"""Detect whether a script was edited since it was written."""

import hashlib
import re
from pathlib import Path

from zorse_megatron.errors import OutputError, Problem
from zorse_megatron.files.target import stream_of

_LINE = re.compile(rb"^# checksum ([0-9a-f]{16})\n", re.MULTILINE)


def with_checksum(script: str) -> str:
    """Add a comment, after the first ones, that no longer fits once the script is edited."""
    *first, rest = script.split("\n", 3)
    return "\n".join([*first, f"# checksum {_checksum(script.encode())}", rest])


def refuse_edited(path: Path, script: str) -> None:
    """Raise OutputError if writing `script` would lose what somebody wrote or changed."""
    if stream_of(path) is not None or not path.exists():
        return
    try:
        there = path.read_bytes()
    except OSError:
        return  # the writer says why
    marked = _LINE.search(there)
    if there == script.encode() or (marked and _is_whole(there, marked)):
        return
    problem = Problem(
        where=str(path),
        found="a script that was edited since zorse launch wrote it"
        if marked
        else "a file that zorse launch did not write",
        expected="a script as zorse launch wrote it, or none yet",
        remedy="Choose another path, or give --force to replace it.",
    )
    raise OutputError("the script is not replaced", [problem])


def _is_whole(script: bytes, marked: re.Match[bytes]) -> bool:
    return marked[1].decode() == _checksum(script[: marked.start()] + script[marked.end() :])


def _checksum(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
