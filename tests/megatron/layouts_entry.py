"""Lets Megatron's own parser and argument check judge commands; one rank.

    layouts_entry FILE

FILE: JSON list of [number of ranks, words]; is overwritten with what is wrong with each, or null.
"""

import contextlib
import json
import os
import sys
from pathlib import Path

from scripts.write_megatron_flags import stock_parser


def verdict(ranks: int, words: list[str]) -> str | None:
    """What Megatron says against a command."""
    from megatron.training.arguments import core_transformer_config_from_args, validate_args

    args = stock_parser().parse_args(words)
    args.rank, args.world_size, args.local_rank = 0, ranks, 0
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    try:
        with contextlib.redirect_stdout(sys.stderr):
            validate_args(args)
            core_transformer_config_from_args(args)
    except (AssertionError, ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def main() -> None:
    """Judge all of them."""
    file = Path(sys.argv[1])
    found = [verdict(ranks, words) for ranks, words in json.loads(file.read_text())]
    file.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
