"""Reads a corpus back with Megatron's reader and prints what is in it."""

import json
import sys
from pathlib import Path


def main() -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    from zorse_megatron.adapter.corpus import tokenizer_flags, write_corpus

    prefix = Path(sys.argv[1])
    if sys.argv[2:] == ["null"]:
        write_corpus(prefix, [("image.py", b"abc\0")], max_bytes=10)
    dataset = IndexedDataset(str(prefix))
    found = {
        "documents": len(dataset.document_indices) - 1,
        "tokens": int(dataset.sequence_lengths.sum()),
        "last_tokens": [int(dataset[i][-1]) for i in range(len(dataset))],
        "tokenizer_flags": tokenizer_flags(),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
