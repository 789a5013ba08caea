"""What the commands print, and how they fail."""

from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console

from zorse_megatron.errors import ZorseError


def print_plain(text: str, *, to_stderr: bool = False) -> None:
    """Print text as it is: no wrapping, and brackets are not read as markup."""
    console = Console(stderr=to_stderr, soft_wrap=True, highlight=False, markup=False, emoji=False)
    console.print(text)


@contextmanager
def reported_errors(*, to_stderr: bool = True) -> Iterator[None]:
    """Turn a ZorseError into its list of problems and exit code 1."""
    try:
        yield
    except ZorseError as error:
        print_plain(str(error), to_stderr=to_stderr)
        raise typer.Exit(1) from error
