"""Writes text whose samples differ in how many tokens count; the argument is the prefix.

The end-of-document token is masked with --eod-mask-loss: rare in long documents, every second to
fourth token in short ones.
"""

import sys
from pathlib import Path

from zorse_megatron.adapter import cpu_mode

if __name__ == "__main__":
    if cpu_mode.needed():
        cpu_mode.enable()
    from zorse_megatron.adapter.corpus import write_corpus

    documents = []
    for number in range(1500):
        long = number % 60 == 0
        text = bytes(33 + (number * 7 + i * i) % 90 for i in range(900 if long else 1 + number % 3))
        documents.append((f"document {number}", text))
    write_corpus(Path(sys.argv[1]), documents, max_bytes=10**7)
