"""Writes the standard library's sources to the given prefix and prints what it wrote."""

import json
import sys
from pathlib import Path


def main() -> None:
    from zorse_megatron.adapter.corpus import standard_library_documents, write_corpus

    info = write_corpus(Path(sys.argv[1]), standard_library_documents(), max_bytes=int(sys.argv[2]))
    print(json.dumps({"documents": info.num_documents, "tokens": info.num_tokens}))


if __name__ == "__main__":
    main()
