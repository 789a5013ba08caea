"""The usual entry, where the disk is full whenever a file is written, and was not when asked."""

import errno
import os

from zorse_megatron.files import read_write
from zorse_megatron.pretrain import main


def write_all(descriptor: int, data: bytes) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


if __name__ == "__main__":
    read_write.write_all = write_all
    main()
