"""Handle a stdout that accepts no more: a full disk, a closed pipe."""

import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from zorse_megatron.files.write import remedy_for

_OF_STREAMS = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EPIPE,
    errno.EIO,
    errno.EBADF,
    errno.ENXIO,
)


@contextmanager
def one_line_if_not_printed() -> Iterator[None]:
    """End the process with status 1 if stdout takes no more: with one line, or none to a pipe.

    `zorse ... | head` is no mistake, and its reader has all that it wanted.
    """
    try:
        try:
            yield
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # what is still in its buffer may be the first to fail
    except OSError as error:
        if error.filename is not None or error.errno not in _OF_STREAMS:
            raise
        _drop_stdout()
        if error.errno != errno.EPIPE:
            line = f"zorse: error: stdout: found {error.strerror}; expected room for the output."
            with contextlib.suppress(OSError, AttributeError):
                print(line, remedy_for(error), file=sys.stderr, flush=True)
        sys.exit(1)


def _drop_stdout() -> None:
    """Let the interpreter's last flush succeed."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
