"""A forked rank: it builds the parser without reading a source, and saves without spawning."""

import argparse
import inspect
import multiprocessing
from typing import Any, NoReturn


def fail(*_args: Any) -> NoReturn:
    raise AssertionError("a rank has read a source of Megatron")


def main() -> None:
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.training import arguments

    inspect.getsource = inspect.getsourcelines = fail  # type: ignore[assignment]
    parser = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    assert parser.parse_args(["--num-layers", "3"]).num_layers == 3
    multiprocessing.set_executable("/nowhere")  # what would be spawned
    queue = filesystem_async.get_write_results_queue()
    queue.put(3)
    assert queue.get() == 3


if __name__ == "__main__":
    main()
