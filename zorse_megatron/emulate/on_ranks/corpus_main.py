"""Writes the text that emulated jobs train on: `... corpus_main PREFIX MAX_BYTES`."""

import json
import sys
from pathlib import Path

from zorse_megatron.adapter.corpus import standard_library_documents, tokenizer_flags, write_corpus


def main() -> None:
    """Write `PREFIX.bin`, `PREFIX.idx`, and the flags to train on them as `PREFIX.json`."""
    prefix = Path(sys.argv[1])
    write_corpus(prefix, standard_library_documents(), max_bytes=int(sys.argv[2]))
    flags = ["--data-path", str(prefix), "--split", "1,0,0", *tokenizer_flags()]
    prefix.with_suffix(".json").write_text(json.dumps(flags))


if __name__ == "__main__":
    main()
