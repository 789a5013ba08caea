"""The vocabulary of schedules: what one rank does, one action after the other.

An action prints as a short word and parses back:

| word          | meaning                                                                  |
|---------------|--------------------------------------------------------------------------|
| `1F3`         | forward of chunk 1 on this rank's micro-batch 3                          |
| `1B3`         | backward of the same                                                     |
| `1W3`         | the gradients of weights that `1B3` has left out                         |
| `1SEND_F3>4[8:12]`| start to send samples 8..11 of chunk 1's output (activation) to rank 4   |
| `2RECV_F0<1[8:12]`| start to receive them from rank 1, for chunk 2's micro-batch 0           |
| `2SEND_B0>1[8:12]`| start to send the gradient of those samples back to rank 1               |
| `1RECV_B3<4[8:12]`| start to receive it from rank 4, for chunk 1's micro-batch 3             |
| `1SEND_F3>4[8:12,0:1/2]` | the first half of each sequence of them, to a tensor-parallel group   |
| `1REDUCE_GRAD`     | sum chunk 1's gradients over its group into each rank's shard            |
| `TIE`         | sum the tied embedding's gradient over the first and the last chunk      |
| `SCALE`       | sum tokens, squares and overflows of gradients over all ranks            |
| `NORM`        | decide with them whether to step, how to scale gradients and how to clip |
| `1STEP`       | optimizer step on this rank's shard of chunk 1                           |
| `1UNSHARD`     | unshard chunk 1's parameters from the group's shards                     |
| `1RESHARD`    | drop chunk 1's unsharded parameters, keep the shard                      |
| `1OFFLOAD`    | let the shard of chunk 1's parameters be in host memory only             |
| `1FETCH`      | copy it from there to the GPU                                            |
| `1OFFLOAD_GRAD`   | let the shard of chunk 1's gradients wait in host memory for the step    |

Sends and receives only start a transfer; a receive may begin some computations before its place in
the list (`receives_posted_at`). A forward or backward waits for the receives that it consumes; a
send's buffer is kept until it has left.

In a list with `1W3`, `1B3` computes gradients of inputs, and of the weights only what Megatron's
linear layers do not delay: of the layers' matrices it keeps inputs and output gradients, which
`1W3` multiplies.

Only what goes to another rank is sent. Replicas of a group run the same micro-batches in all of
its chunks, so between neighbouring chunks of one group there are no sends and receives: `2F3`
takes what `1F3` on the same rank has left, and `1B3` the gradient that `2B3` has left.

REDUCE_GRAD, UNSHARD and FETCH only start something, too. A forward or backward waits for the
UNSHARD of its chunk that precedes it, a UNSHARD for the FETCH of its chunk, NORM for everything. A
REDUCE_GRAD frees the unsharded gradients of a chunk that the list RESHARDs. An OFFLOAD copies only
if a STEP has changed the shard since it was fetched; a STEP writes the new parameters of a chunk
whose shard is in host memory there. An OFFLOAD_GRAD waits for the chunk's REDUCE_GRAD, and for the
OFFLOAD_GRAD before it to have left; STEP brings back what waits.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from zorse_megatron.schedule.tensor_parallel_parts import SequenceSlice


class Kind(StrEnum):
    """What an action does."""

    __hash__ = str.__hash__  # `Enum` has its own in Python, and simulations hash millions

    FORWARD = "F"
    BACKWARD = "B"
    WEIGHT_GRADIENT = "W"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    REDUCE_GRAD = "REDUCE_GRAD"
    TIE = "TIE"
    SCALE = "SCALE"
    NORM = "NORM"
    STEP = "STEP"
    UNSHARD = "UNSHARD"
    RESHARD = "RESHARD"
    OFFLOAD = "OFFLOAD"
    FETCH = "FETCH"
    OFFLOAD_GRAD = "OFFLOAD_GRAD"


COMPUTE = frozenset({Kind.FORWARD, Kind.BACKWARD})
"""What messages are made by, and for."""
ON_LAYERS = COMPUTE | {Kind.WEIGHT_GRADIENT}
"""What computes with one micro-batch."""
SENDS = frozenset({Kind.SEND_F, Kind.SEND_B})
RECEIVES = frozenset({Kind.RECV_F, Kind.RECV_B})
TRANSFERS = SENDS | RECEIVES
WHOLE_RANK = frozenset({Kind.TIE, Kind.SCALE, Kind.NORM})

MATCHING = {
    Kind.SEND_F: Kind.RECV_F,
    Kind.SEND_B: Kind.RECV_B,
}
"""The receive that takes what a send sends."""


class Action(NamedTuple):
    """One step of one rank's list. Unused fields are None.

    `peer` is a global rank; `samples` is a half-open interval of the global batch; `positions` is
    what is sent of their sequences, None for all of it.
    """

    kind: Kind
    chunk: int | None = None
    micro_batch: int | None = None
    peer: int | None = None
    samples: tuple[int, int] | None = None
    positions: SequenceSlice | None = None

    @property
    def computation(self) -> tuple[bool, int | None, int | None]:
        """(forward?, chunk, micro-batch) of a forward or backward, and of what a receive is for."""
        return self.kind in (Kind.FORWARD, Kind.RECV_F), self.chunk, self.micro_batch

    @property
    def other_chunk(self) -> int:
        """The chunk at the other end of a transfer."""
        assert self.chunk is not None and self.kind in TRANSFERS
        from_above = self.kind in (Kind.RECV_F, Kind.SEND_B)
        return self.chunk - 1 if from_above else self.chunk + 1

    def __str__(self) -> str:
        if self.kind in WHOLE_RANK:
            return str(self.kind)
        if self.kind in TRANSFERS:
            assert self.samples is not None
            arrow = ">" if self.kind in SENDS else "<"
            start, stop = self.samples
            positions = "" if self.positions is None else f",{self.positions}"
            end = f"{arrow}{self.peer}[{start}:{stop}{positions}]"
            return f"{self.chunk}{self.kind}{self.micro_batch}{end}"
        suffix = "" if self.micro_batch is None else str(self.micro_batch)
        return f"{self.chunk}{self.kind}{suffix}"


_TRANSFER = re.compile(
    r"(\d+)(SEND_F|RECV_F|SEND_B|RECV_B)(\d+)([<>])(\d+)\[(\d+):(\d+)(?:,(\d+):(\d+)/(\d+))?\]"
)
_COMPUTE = re.compile(r"(\d+)([FBW])(\d+)")
_CHUNK = re.compile(r"(\d+)(REDUCE_GRAD|STEP|UNSHARD|RESHARD|OFFLOAD_GRAD|OFFLOAD|FETCH)")


def parse_action(word: str) -> Action:
    """Read back what `str(action)` wrote. Raises ValueError on anything else."""
    if word in WHOLE_RANK:
        return Action(kind=Kind(word))
    if match := _COMPUTE.fullmatch(word):
        return Action(kind=Kind(match[2]), chunk=int(match[1]), micro_batch=int(match[3]))
    if match := _CHUNK.fullmatch(word):
        return Action(kind=Kind(match[2]), chunk=int(match[1]))
    match = _TRANSFER.fullmatch(word)
    if match is None or (match[4] == ">") != (Kind(match[2]) in SENDS):
        raise ValueError(
            f"found {word!r}; expected an action such as 1F3, 1SEND_F3>4[8:12] or NORM"
        )
    return Action(
        kind=Kind(match[2]),
        chunk=int(match[1]),
        micro_batch=int(match[3]),
        peer=int(match[5]),
        samples=(int(match[6]), int(match[7])),
        positions=None
        if match[8] is None
        else SequenceSlice(start=int(match[8]), stop=int(match[9]), of=int(match[10])),
    )


@dataclass(frozen=True, kw_only=True)
class ActionLists:
    """One list of actions per global rank: what the simulator times and the runtime executes."""

    ranks: tuple[tuple[Action, ...], ...]

    def __str__(self) -> str:
        return "\n".join(
            f"rank {rank}: {' '.join(map(str, actions))}" for rank, actions in enumerate(self.ranks)
        )


# Queries on lists of actions.


_PLACES = frozenset({Kind.FETCH, Kind.OFFLOAD})


def edges_of(each: Iterable[ActionLists]) -> list[tuple[int, int]]:
    """All pairs (source, target) of ranks that send, in one order that every rank derives."""
    return sorted(
        {
            (rank, action.peer)
            for lists in each
            for rank, actions in enumerate(lists.ranks)
            for action in actions
            if action.kind in SENDS and action.peer is not None
        }
    )


def resharded_chunks(actions: Sequence[Action]) -> frozenset[int]:
    """Chunks of which a rank keeps only shards: their parameters are released."""
    return frozenset(a.chunk for a in actions if a.kind is Kind.RESHARD and a.chunk is not None)


def chunks_left_in_host(actions: Sequence[Action]) -> frozenset[int]:
    """Chunks whose parameters are in the host when a list ends, hence when it starts again."""
    last = {a.chunk: a.kind for a in actions if a.kind in _PLACES}
    return frozenset(c for c, kind in last.items() if kind is Kind.OFFLOAD and c is not None)


# A list as it repeats: from one NORM to the next.
#
# All ranks meet at NORM, with nothing of theirs under way: it waits for every collective, copy and
# send of the rank. So an iteration lasts from one NORM to the next, whatever was before: ranks step
# and gather while others, or they themselves, are in the first passes of the next iteration.


def from_norm(actions: Sequence[Action]) -> tuple[Action, ...]:
    """The list from behind its NORM around to it; as it is where it has none."""
    cut = num_before_update(actions)
    return (*actions[cut:], *actions[:cut])


def num_before_update(actions: Sequence[Action]) -> int:
    """How many actions come before the update, NORM included; all where there is none."""
    norms = [at for at, action in enumerate(actions) if action.kind is Kind.NORM]
    return norms[0] + 1 if norms else len(actions)
