"""What ranks and the conductor say to each other. Times in seconds of the emulated cluster."""

from dataclasses import dataclass
from typing import Literal

Stream = tuple[str | int, ...]
"""What runs one operation at a time: a group's collectives, or one direction of a pair in it."""

Name = tuple[Stream, int]
"""An operation: the how-many-eth of its stream. All ranks that take part count alike."""

CollectiveKind = Literal[
    "all_reduce", "all_gather", "reduce_scatter", "exchange", "broadcast", "meeting"
]
"""A meeting takes no time: what it would take is in what the ranks compute."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Transfer:
    """Point to point. `source` and `target`: ranks of the job."""

    source: int
    target: int
    num_bytes: int | None
    """What the source sends; None where the target says that it is ready."""

    @property
    def ranks(self) -> tuple[int, int]:
        """Those that take part."""
        return self.source, self.target


@dataclass(frozen=True, kw_only=True, slots=True)
class Collective:
    """One operation of a group.

    `part_bytes`: of a gather, a scatter or an exchange what each rank owns of the buffer; of an
    all-reduce or a broadcast the buffer, as one part.
    """

    kind: CollectiveKind
    ranks: tuple[int, ...]
    part_bytes: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class PartExchange:
    """Messages between ranks of a group, all at once."""

    ranks: tuple[int, ...]
    messages: tuple[tuple[int, int, int], ...]
    """(source, target, bytes); the same on all ranks."""


Operation = Transfer | Collective | PartExchange


@dataclass(frozen=True, kw_only=True, slots=True)
class PostOperation:
    """A rank takes part in an operation from now on, and goes on with its own work."""

    now_s: float
    name: Name
    operation: Operation
    after: Name | None = None
    """One of the rank's operations that must be done before it starts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wait:
    """A rank stops until an operation is done."""

    now_s: float
    name: Name


@dataclass(frozen=True, kw_only=True, slots=True)
class Finish:
    """A rank ends; nobody needs to wait for it any more."""


Request = PostOperation | Wait | Finish


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """To `Wait`: the rank goes on at `now_s`, which is never earlier than it asked."""

    now_s: float
    done: tuple[Name, ...] = ()
    """The rank's operations that have been done since the last answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """In place of an answer: the emulation cannot proceed."""

    reason: str
