"""Read a bounded file that a user names."""

import errno
import os
import stat
from pathlib import Path

from zorse_megatron.files.target import kind_of, stream_of


class NotInputError(OSError):
    """A path leads to something that is not read; `strerror` names it, with its article."""


MAX_INPUT_BYTES = 64 * 2**20
"""Above any plan, cluster, model or profile: a plan of 100,000 GPUs has some 10 MiB."""


def read_input(path: str | Path, *, max_bytes: int = MAX_INPUT_BYTES) -> bytes:
    """Return the bytes of a regular file, or of a stream such as /dev/stdin or `<(command)`.

    Raises NotInputError for anything else (a FIFO or device may never end), and for more bytes;
    any other OSError where there is nothing to read.
    """
    path = Path(path)
    stream = stream_of(path)
    # Not blocking: a FIFO that nobody writes to would be waited for before it can be told.
    descriptor = (
        os.dup(stream) if stream is not None else os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    )
    with os.fdopen(descriptor, "rb") as file:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode) and (stream is None or stat.S_ISDIR(mode)):
            raise NotInputError(errno.EINVAL, kind_of(mode))
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise NotInputError(errno.EFBIG, f"a file of more than {max_bytes / 2**20:.0f} MiB")
    return data
