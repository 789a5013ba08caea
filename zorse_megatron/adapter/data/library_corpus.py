"""A real-text corpus that every Python has: the sources of its standard library."""

import sysconfig
from collections.abc import Iterator
from pathlib import Path

from zorse_megatron.adapter.data.byte_corpus import CorpusInfo, write_byte_corpus

# Parts that some distributions leave out or generate for the machine.
_LEFT_OUT = frozenset({"__pycache__", "idlelib", "lib2to3", "site-packages", "test", "tests"})


def standard_library_documents() -> Iterator[tuple[str, bytes]]:
    """Yield (path, text) of the standard library's modules in order of their paths.

    The same on every machine with the same version of Python.
    """
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(path.relative_to(root) for path in root.rglob("*.py")):
        generated = path.name.startswith("_sysconfigdata") or path.parts[0].startswith("config-")
        if not generated and _LEFT_OUT.isdisjoint(path.parts):
            text = (root / path).read_bytes()
            if text:
                yield path.as_posix(), text


def write_corpus(prefix: Path, *, max_bytes: int) -> CorpusInfo:
    """Write `<prefix>.bin` and `<prefix>.idx` with at most `max_bytes` of text.

    Each source file is a document. Train on it with `--data-path <prefix>` and `tokenizer_flags()`.
    """
    return write_byte_corpus(prefix, documents=standard_library_documents(), max_bytes=max_bytes)
