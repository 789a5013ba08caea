"""Reads what ranks have recorded."""

import json
from pathlib import Path

from zorse_megatron.trace import Span


def load_trace(path: Path) -> tuple[int, tuple[Span, ...]]:
    """Read back what `Trace.save` wrote: the rank and its spans."""
    data = json.loads(path.read_text())
    return data["rank"], tuple(Span(**span) for span in data["spans"])
