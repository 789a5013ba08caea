"""Text to train on without a download: byte tokens in Megatron's own format.

A token is a byte. Byte 0 occurs in no text and ends a document, so the vocabulary is exactly 256:
stock's NullTokenizer takes both numbers as flags.

`python -m zorse_megatron.adapter.corpus PREFIX MAX_BYTES` writes the standard library's sources.
"""

import json
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder, get_bin_path, get_idx_path

from zorse_megatron.errors import ZorseError

VOCAB_SIZE = 256
END_OF_DOCUMENT = 0
# Stock pads the vocabulary to a multiple of this times the tensor-parallel size (default 128); with
# 32 it stays 256 up to tensor parallelism 8, so that checkpoints fit between layouts.
_VOCAB_DIVISIBLE_BY = 32
# What Megatron reads for a vocabulary of this size (`DType.optimal_dtype`).
_TOKEN_TYPE = np.uint16


class CorpusError(ZorseError):
    """The documents cannot become a corpus."""


@dataclass(frozen=True, kw_only=True)
class CorpusInfo:
    """A corpus on disk: `<prefix>.bin` and `<prefix>.idx`, for stock's `--data-path <prefix>`."""

    prefix: Path
    num_documents: int
    num_tokens: int


def tokenizer_flags() -> list[str]:
    """Return the stock flags for byte tokens."""
    return [
        *("--tokenizer-type", "NullTokenizer"),
        *("--vocab-size", str(VOCAB_SIZE)),
        *("--null-tokenizer-eod-id", str(END_OF_DOCUMENT)),
        *("--make-vocab-size-divisible-by", str(_VOCAB_DIVISIBLE_BY)),
    ]


def write_corpus(
    prefix: Path, documents: Iterable[tuple[str, bytes]], *, max_bytes: int
) -> CorpusInfo:
    """Write named documents to `<prefix>.bin` and `<prefix>.idx`, at most `max_bytes` of text.

    The document that reaches the limit is cut there. Train on it with `--data-path <prefix>` and
    `tokenizer_flags()`. Source of the format:
    `megatron.core.datasets.indexed_dataset`.
    """
    prefix.parent.mkdir(parents=True, exist_ok=True)
    builder = IndexedDatasetBuilder(get_bin_path(str(prefix)), dtype=_TOKEN_TYPE)
    num_documents, num_bytes = 0, 0
    for name, text in documents:
        if END_OF_DOCUMENT in text:
            raise CorpusError.of(
                "A document is no text",
                where=name,
                found=f"a null byte at offset {text.index(END_OF_DOCUMENT)}",
                expected="text, because byte 0 marks the end of a document",
                remedy="Leave the file out.",
            )
        kept = text[: max_bytes - num_bytes]
        if kept:
            tokens = np.frombuffer(kept + bytes([END_OF_DOCUMENT]), dtype=np.uint8)
            builder.add_document(tokens, [len(tokens)])
            num_documents += 1
            num_bytes += len(kept)
        if num_bytes == max_bytes:
            break
    builder.finalize(get_idx_path(str(prefix)))
    return CorpusInfo(
        prefix=prefix, num_documents=num_documents, num_tokens=num_bytes + num_documents
    )


# A real-text corpus that every Python has: the sources of its standard library.


# Parts that some distributions leave out or generate for the machine.
_LEFT_OUT = frozenset({"__pycache__", "idlelib", "lib2to3", "site-packages", "test", "tests"})


def standard_library_documents() -> Iterator[tuple[str, bytes]]:
    """Yield (path, text) of the standard library's modules in order of their paths, as documents.

    The same on every machine with the same version of Python.
    """
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(path.relative_to(root) for path in root.rglob("*.py")):
        generated = path.name.startswith("_sysconfigdata") or path.parts[0].startswith("config-")
        if not generated and _LEFT_OUT.isdisjoint(path.parts):
            text = (root / path).read_bytes()
            if text:
                yield path.as_posix(), text


def main() -> None:
    """Write `PREFIX.bin`, `PREFIX.idx`, and the flags to train on them as `PREFIX.json`."""
    prefix = Path(sys.argv[1])
    info = write_corpus(prefix, standard_library_documents(), max_bytes=int(sys.argv[2]))
    flags = ["--data-path", str(prefix), "--split", "1,0,0", *tokenizer_flags()]
    prefix.with_suffix(".json").write_text(json.dumps(flags))
    print(json.dumps({"documents": info.num_documents, "tokens": info.num_tokens}))


if __name__ == "__main__":
    main()
