"""Tensors sent between chunks: split and joined along the batch dimension.

Between tensor-parallel groups they are also split along the sequence
(`schedule.tensor_parallel_parts`). A TP group whose ranks each need the whole gathers it inside
itself when it is taken, right before the computation that all its ranks come to next.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from zorse_megatron.runtime.collectives import all_gather_uneven
from zorse_megatron.runtime.transport import Receive, Transport, Work
from zorse_megatron.schedule.actions import Action, Kind
from zorse_megatron.schedule.samples import MicroBatch
from zorse_megatron.schedule.tensor_parallel_parts import SequenceSlice, TpPartition, slice_of_rank
from zorse_megatron.schedule.transfer_windows import receives_posted_at, sends_waited_at

# Where a rank is in its tensor-parallel group, and what of an activation it has.


@dataclass(frozen=True, kw_only=True)
class TpRank:
    """One rank of a TP group; a rank that is a TP group of its own has none."""

    index: int
    degree: int
    group: dist.ProcessGroup
    """The TP group's ranks, in order."""
    is_split: bool
    """Whether activations between layers are split over the TP group (sequence parallelism)."""
    tp_shards: TpPartition
    """What its ranks hold of each layer."""

    @property
    def positions(self) -> SequenceSlice:
        """Positions that this rank sends and receives."""
        return slice_of_rank(self.index, self.degree)

    def held(self, length: int) -> tuple[int, int]:
        """Positions of an activation that this rank has: all, or its part."""
        return self.positions.bounds(length) if self.is_split else (0, length)


@dataclass(kw_only=True)
class ExchangeLog:
    """What a rank that shares experts has sent."""

    sent: list[tuple[int, ...]] = field(default_factory=list)
    """Of each exchange: bytes to each rank. Who reads them empties it."""
    returns: bool = False
    """Whether the last one was from the ranks of experts to those of tokens."""


@dataclass(frozen=True, kw_only=True)
class ExpertRank:
    """One of the ranks of a replica that share the experts of its layers, and nothing else."""

    index: int
    group: dist.ProcessGroup
    """The ranks, in order."""
    parts: TpPartition
    """Which experts its ranks hold."""
    tokens: tuple[int, ...]
    """What each rank sends at once: those of a micro-batch, or of half of it."""
    overlap: bool = False
    """Whether micro-batches run as two interleaved halves."""
    log: ExchangeLog = field(default_factory=ExchangeLog, compare=False)
    """Of its exchanges, as they are started."""

    @property
    def experts(self) -> range:
        """Those that this rank holds."""
        return self.parts.experts_of(self.index)


@dataclass(frozen=True, kw_only=True)
class ActivationSpec:
    """What a boundary activation looks like: [sequence_length, samples, hidden_size].

    `dtype`: this rank's; `neighbours`: chunk -> its activations' dtype, where that may differ.
    """

    sequence_length: int
    hidden_size: int
    dtype: torch.dtype
    device: torch.device
    neighbours: Mapping[int, torch.dtype] = field(default_factory=dict)

    def empty(
        self, num_samples: int, dtype: torch.dtype, positions: tuple[int, int] | None = None
    ) -> torch.Tensor:
        """An uninitialised activation of `num_samples` samples; `positions`: None for all."""
        start, stop = positions or (0, self.sequence_length)
        shape = (stop - start, num_samples, self.hidden_size)
        return torch.empty(shape, dtype=dtype, device=self.device)

    def message_dtype(self, other: int, *, sends: bool) -> torch.dtype:
        """In which dtype to exchange tensors with a chunk: the narrower, or the receiver's.

        So what a 16-bit group sends is widened where it arrives, which changes no value.
        """
        there = self.neighbours.get(other, self.dtype)
        source, target = (self.dtype, there) if sends else (there, self.dtype)
        return source if source.itemsize < target.itemsize else target


@dataclass(frozen=True, kw_only=True)
class _Incoming:
    samples: tuple[int, int]
    positions: tuple[int, int]
    buffer: torch.Tensor
    receive: Receive
    peer: int
    tag: int

    @property
    def order(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """By samples, then by positions."""
        return self.samples, self.positions


@dataclass(kw_only=True)
class Mailbox:
    """Starts the sends and receives of one rank and joins what arrived.

    Keys are (is activation, chunk, micro-batch). A tensor is copied at most once at each end: where
    it is cut or its dtype changes, and where pieces are joined or theirs does. What arrives in one
    piece is handed over as it is.
    """

    transport: Transport
    spec: ActivationSpec
    global_batch_size: int
    place: TpRank | None = None
    """This rank's, in a TP group of several ranks."""
    waiting: Callable[[], AbstractContextManager[None]] = nullcontext
    """Surrounds what waits for other ranks."""
    sent: Callable[[int, int, int], None] = lambda peer, tag, num_bytes: None
    """Told of each message that has been handed over."""
    arrived: Callable[[int, int], None] = lambda peer, tag: None
    """Told of each message, right after the wait for it."""
    incoming: dict[tuple[bool, int, int], list[_Incoming]] = field(default_factory=dict)
    leaving: dict[int, list[tuple[Work, torch.Tensor]]] = field(default_factory=dict)
    """Position in the list -> messages that must have left before its action."""
    _to_open: dict[int, list[tuple[int, Action]]] = field(default_factory=dict)
    """Position in the list -> receives (with theirs) whose buffers are opened there."""
    _opened: dict[int, Receive] = field(default_factory=dict)
    """Position of a receive that has not been launched."""
    _waited_at: Mapping[int, int] = field(default_factory=dict)

    def begin(self, actions: Sequence[Action]) -> None:
        """Start a list: from now on positions are those of its actions."""
        left = self.incoming or self.leaving
        assert not left, "the list before this one left tensors behind"
        self._waited_at = sends_waited_at(actions)
        self._to_open = {}
        for position, post_position in receives_posted_at(actions).items():
            self._to_open.setdefault(post_position, []).append((position, actions[position]))

    def come_to(self, position: int) -> None:
        """Open the buffers of the receives that may begin before this action; let go of sends.

        Buffers first: what is to arrive does not wait for what is to leave.
        """
        for at, action in self._to_open.pop(position, ()):
            assert action.samples is not None and action.peer is not None
            start, stop = action.samples
            dtype = self.spec.message_dtype(action.other_chunk, sends=False)
            positions = self._positions(action)
            buffer = self.spec.empty(stop - start, dtype, positions)
            tag = self._tag(action)
            receive = self.transport.open(buffer, peer=action.peer, tag=tag)
            piece = _Incoming(
                samples=(start, stop),
                positions=positions,
                buffer=buffer,
                receive=receive,
                peer=action.peer,
                tag=tag,
            )
            self.incoming.setdefault(self._key(action), []).append(piece)
            self._opened[at] = receive
        self._close(position)

    def start_receive(self, position: int) -> None:
        """Launch one receive, whose buffer is open; its data is taken with `take`."""
        self._opened.pop(position).launch()

    def start_send(
        self, position: int, action: Action, tensor: torch.Tensor, micro_batch: MicroBatch
    ) -> None:
        """Send the action's samples of `tensor`, which holds all of `micro_batch`."""
        assert action.samples is not None and action.peer is not None
        start, stop = action.samples
        part = tensor
        if (start, stop) != (micro_batch.start, micro_batch.stop):
            part = tensor[:, start - micro_batch.start : stop - micro_batch.start]
        if action.positions is not None:
            first, last = self._positions(action)
            part = part[first - self._held[0] : last - self._held[0]]
        dtype = self.spec.message_dtype(action.other_chunk, sends=True)
        # One pass over the memory at most; `to` leaves what has the dtype as it is.
        part = part.to(dtype, memory_format=torch.contiguous_format).contiguous()
        tag = self._tag(action)
        self.sent(action.peer, tag, part.numel() * part.element_size())
        work = self.transport.send(part, peer=action.peer, tag=tag)
        self.leaving.setdefault(self._waited_at[position], []).append((work, part))

    def take(self, *, activation: bool, chunk: int, micro_batch: MicroBatch) -> torch.Tensor:
        """Wait for all pieces of a micro-batch; join them along the batch dimension."""
        if not micro_batch.size:
            return self.spec.empty(0, self.spec.dtype)
        parts = self.incoming.pop((activation, chunk, micro_batch.index))
        parts.sort(key=lambda piece: piece.order)
        for piece in parts:
            with self.waiting():
                piece.receive.wait()
            self.arrived(piece.peer, piece.tag)
        whole_sequence = 0, self.spec.sequence_length
        if self.place is not None or any(piece.positions != whole_sequence for piece in parts):
            return self._assembled(parts, micro_batch)
        covered = [micro_batch.start, *(piece.samples[1] for piece in parts)]
        assert covered[-1] == micro_batch.stop and covered[:-1] == [p.samples[0] for p in parts]
        pieces = [piece.buffer for piece in parts]
        if len(pieces) == 1:
            return pieces[0].to(self.spec.dtype)
        # One pass over the memory, also where the dtype changes.
        whole = self.spec.empty(micro_batch.stop - micro_batch.start, self.spec.dtype)
        return torch.cat(pieces, dim=1, out=whole)

    def _assembled(self, parts: Sequence[_Incoming], micro_batch: MicroBatch) -> torch.Tensor:
        """Put parts of sequences in their places; what other ranks of the TP group have is
        gathered."""
        first, last = self._held
        count = micro_batch.stop - micro_batch.start
        whole = self.spec.empty(count, self.spec.dtype, (first, last))
        for piece in parts:
            (low, high), (start, stop) = piece.positions, piece.samples
            samples = slice(start - micro_batch.start, stop - micro_batch.start)
            whole[low - first : high - first, samples].copy_(piece.buffer)
        if self.place is None or self.place.is_split:
            mine = last - first
        else:
            length, row = self.spec.sequence_length, count * self.spec.hidden_size
            ranks = range(self.place.degree)
            cuts = [slice_of_rank(each, self.place.degree).bounds(length) for each in ranks]
            bounds = [(low * row, high * row) for low, high in cuts]
            with self.waiting():
                all_gather_uneven(whole.view(-1), bounds, self.place.group).wait()
            low, high = cuts[self.place.index]
            mine = high - low
        assert sum(piece.buffer.shape[0] * piece.buffer.shape[1] for piece in parts) == mine * count
        return whole

    @property
    def _held(self) -> tuple[int, int]:
        """Positions of activations that this rank has."""
        length = self.spec.sequence_length
        return (0, length) if self.place is None else self.place.held(length)

    def _positions(self, action: Action) -> tuple[int, int]:
        length = self.spec.sequence_length
        return (0, length) if action.positions is None else action.positions.bounds(length)

    def tensors(self) -> Iterator[torch.Tensor]:
        """Everything that is arriving or leaving."""
        for pieces in self.incoming.values():
            yield from (piece.buffer for piece in pieces)
        for messages in self.leaving.values():
            yield from (part for _, part in messages)

    def flush(self) -> None:
        """Wait until everything that was sent has left."""
        for position in sorted(self.leaving):
            self._close(position)

    def _close(self, position: int) -> None:
        messages = self.leaving.pop(position, [])
        if messages:
            with self.waiting():
                for work, _ in messages:
                    work.wait()

    @staticmethod
    def _key(action: Action) -> tuple[bool, int, int]:
        assert action.chunk is not None and action.micro_batch is not None
        return action.kind is Kind.RECV_F, action.chunk, action.micro_batch

    def _tag(self, action: Action) -> int:
        """A number that both ends derive, and no other transfer of the step shares."""
        assert action.chunk is not None and action.samples is not None
        gradient = action.kind in (Kind.SEND_B, Kind.RECV_B)
        # Name the boundary by its lower chunk, which both ends can tell.
        boundary = min(action.chunk, action.other_chunk)
        return 2 * (boundary * self.global_batch_size + action.samples[0]) + gradient
