"""Memory that a rank and its watcher share, so that the rank's last words outlive it."""

import mmap
import struct

_LENGTH = struct.Struct("<H")
_CAPACITY_BYTES = 2000


class SharedText:
    """A short text with one writer, in memory that survives a fork.

    There are two places, and a byte says which holds the text: a writer that dies while it writes
    leaves the text of before. A write takes about 2 microseconds.
    """

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 1 + 2 * (_LENGTH.size + _CAPACITY_BYTES))

    def write(self, text: str) -> None:
        """Replace the text; what does not fit is cut off."""
        data = text.encode(errors="replace")[:_CAPACITY_BYTES]
        slot = 1 - self._memory[0]
        start = self._start(slot)
        self._memory[start : start + len(data)] = data
        _LENGTH.pack_into(self._memory, start - _LENGTH.size, len(data))
        self._memory[0] = slot

    def read(self) -> str:
        """Return the text; empty before the first write."""
        start = self._start(self._memory[0])
        (length,) = _LENGTH.unpack_from(self._memory, start - _LENGTH.size)
        return bytes(self._memory[start : start + length]).decode(errors="ignore")

    @staticmethod
    def _start(slot: int) -> int:
        return 1 + slot * (_LENGTH.size + _CAPACITY_BYTES) + _LENGTH.size


class RankPage:
    """What a rank and its watcher tell each other."""

    def __init__(self) -> None:
        self.phase = SharedText()
        """By the rank: what it is doing."""
        self.word = SharedText()
        """By the rank: how it is about to end, see `root_cause.LastWord`."""
        self.address = SharedText()
        """By the rank: where the watcher of rank 0 listens."""
        self._flags = mmap.mmap(-1, 3)

    @property
    def must_end(self) -> bool:
        """By the watcher: the rank has to end."""
        return self._flags[0] != 0

    def end(self) -> None:
        """Tell the rank to end."""
        self._flags[0] = 1

    @property
    def is_blamed(self) -> bool:
        """By the watcher: no other rank is at fault, and the rank may raise what it has."""
        return self._flags[2] != 0

    def blame(self) -> None:
        """Tell the rank that it is blamed."""
        self._flags[2] = 1

    @property
    def beat(self) -> int:
        """By the watcher: changes while it is alive."""
        return self._flags[1]

    def count_beat(self) -> None:
        """Show the rank that its watcher is alive."""
        self._flags[1] = (self._flags[1] + 1) % 256
