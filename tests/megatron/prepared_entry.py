"""A forked rank: it builds the parser without reading a source, and saves without spawning.

Its arguments are those that stock would build here.
"""

import argparse
import inspect
import multiprocessing
import os
from typing import Any, NoReturn


def fail(*_args: Any) -> NoReturn:
    raise AssertionError("a rank has read a source of Megatron")


def main() -> None:
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.training import arguments

    from zorse_megatron.flags import command
    from zorse_megatron.flags.command import read_command, unknown_problems

    stock = arguments.add_megatron_arguments.__wrapped__  # type: ignore[attr-defined]
    words = ["--num-layers", "3"]
    expected = stock(argparse.ArgumentParser(allow_abbrev=False)).parse_args(words)
    inspect.getsource = inspect.getsourcelines = fail  # type: ignore[assignment]
    parser = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    assert parser.parse_args(words) == expected
    made = command._parser.cache_info().misses
    read_command(words)
    unknown_problems(words, [word for action in parser._actions for word in action.option_strings])
    assert command._parser.cache_info().misses == made, "what reads the flags is built once more"
    assert expected.local_rank == int(os.environ["RANK"]), "of this rank, not of its parent"
    multiprocessing.set_executable("/nowhere")  # what would be spawned
    queue = filesystem_async.get_write_results_queue()
    queue.put(3)
    assert queue.get() == 3


if __name__ == "__main__":
    main()
