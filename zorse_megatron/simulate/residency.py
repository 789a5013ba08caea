"""Where a rank's parameters are: unsharded or a shard, on the GPU or in the host.

A list is taken to be repeated: what it leaves behind is what it starts from. So a chunk starts as
a shard if RESHARD is the last of its UNSHARDs and RESHARDs, and in host memory if OFFLOAD is the
last of its OFFLOADs and FETCHes; with neither it is unsharded, and on the GPU.

FETCH copies parameters to the GPU (unsharded, or the shard after a RESHARD). OFFLOAD takes them off
the GPU, and copies them only if a STEP has changed them there since they were fetched. Where they
are in the host while a STEP runs, it writes the new ones there.

Optimizer state that is offloaded by the plan's setting stays in the host all the time, and passes
through the GPU during STEP, two pieces at a time, as `adapter.optimizer.host_state` has them: one
that is stepped and one that is on its way. If it is a fraction, the first pieces stay on the GPU.
Parameters that are in the host then are there for as long as their chunk's pieces are, and so are
gradients that OFFLOAD_GRAD has sent there. Those pass once more before, chunk by chunk, for their
norm (`adapter.optimizer.streamed_gradients`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter

from zorse_megatron.costs.stage_formulas import widened_bytes
from zorse_megatron.schedule.actions import COMPUTE, TRANSFERS, Action, Kind
from zorse_megatron.schedule.shards import kept_pieces, largest_piece, state_pieces
from zorse_megatron.schedule.transfer_windows import offloaded_gradients
from zorse_megatron.simulate.assumptions import SimulationError
from zorse_megatron.simulate.rank_bytes import RankSizes

_FORMS = frozenset({Kind.UNSHARD, Kind.RESHARD})
_LOCATIONS = frozenset({Kind.OFFLOAD, Kind.FETCH})


@dataclass(frozen=True, kw_only=True)
class Move:
    """What one action changes on the GPU, and what it copies over the host link."""

    num_bytes: int
    copied_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class SteppedUnit:
    """What a STEP steps at once: a piece of a chunk's state, or all of a chunk."""

    chunk: int
    elements: int
    state_bytes: int
    """Of its state, what passes through the GPU."""
    in_bytes: int
    """What comes from the host for it."""
    out_bytes: int
    """What goes there after it."""


@dataclass(frozen=True, kw_only=True)
class StepWorkingSet:
    """What is on the GPU while a STEP runs, beside what is there all the time."""

    parameter_bytes: int = 0
    state_bytes: int = 0
    gradient_bytes: int = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of parameters, state and gradients together."""
        return self.parameter_bytes + self.state_bytes + self.gradient_bytes


_AMOUNTS = ("parameter_bytes", "state_bytes", "gradient_bytes", "num_bytes")


@dataclass(kw_only=True)
class _ChunkResidency:
    unsharded_bytes: int
    shard_bytes: int
    is_unsharded: bool
    in_host: bool
    is_changed: bool = False
    """Whether a STEP has changed the parameters where they are, on the GPU."""

    @property
    def form_bytes(self) -> int:
        """In the form that they have now, wherever they are."""
        return self.unsharded_bytes if self.is_unsharded else self.shard_bytes

    @property
    def on_gpu_bytes(self) -> int:
        """What they take of the GPU's memory."""
        return 0 if self.in_host else self.form_bytes


class Residency:
    """Follows one rank's list; raises SimulationError where it uses what is not there."""

    def __init__(self, sizes: RankSizes, rank: int, actions: Sequence[Action]) -> None:
        self.rank = rank
        self.sizes = sizes
        self.stepped: list[SteppedUnit] = []
        """What the update does in turn."""
        self.step_working_sets: dict[int, tuple[StepWorkingSet, ...]] = {}
        """Position of a STEP -> what passes through the GPU meanwhile when it is most: of one kind,
        and last in all."""
        self.moves: dict[int, Move] = {}
        """Position in the list -> what the action moves."""
        self.gradients_in_host = offloaded_gradients(actions)
        """Chunks whose gradients are in the host when STEP comes."""
        self.resharded: set[int] = set()
        """Chunks that the list reshards."""
        last = {
            (action.chunk, action.kind in _FORMS): action.kind
            for action in actions
            if action.kind in _FORMS | _LOCATIONS
        }
        self._chunks = {chunk: self._first(chunk, last) for chunk in sizes.chunks(rank)}
        self.start_parameter_bytes = sum(
            state.on_gpu_bytes + sizes.frozen_bytes(rank, chunk)
            for chunk, state in self._chunks.items()
        )
        self.start_state_bytes = self._state_bytes()
        for position, action in enumerate(actions):
            if action.kind not in TRANSFERS or action.chunk not in self._chunks:
                self._follow(position, action)

    def _first(self, chunk: int, last: dict[tuple[int | None, bool], Kind]) -> _ChunkResidency:
        memory, owned = self.sizes.memory_of(chunk), self._owned(chunk)
        # What is owned of parts lies beside what is computed with (`adapter.data_parallel`).
        beside = 0 if self.sizes.mixed_tp[chunk] is None else memory.parameter_bytes(owned)
        return _ChunkResidency(
            unsharded_bytes=memory.parameter_bytes(self.sizes.held(self.rank, chunk)) + beside,
            shard_bytes=memory.parameter_bytes(owned),
            is_unsharded=last.get((chunk, True)) is not Kind.RESHARD,
            in_host=last.get((chunk, False)) is Kind.OFFLOAD,
        )

    def _state_bytes(self) -> int:
        """Optimizer state on the GPU; what is in the host instead is streamed."""
        if not self._is_state_in_host:
            return sum(
                self.sizes.memory_of(chunk).state_bytes(self._owned(chunk))
                for chunk in self._chunks
            )
        return sum(
            self.sizes.memory_of(chunk).state_bytes(piece)
            for chunk in self._chunks
            for piece in state_pieces(self._owned(chunk))[: self._num_kept(chunk)]
        )

    def _owned(self, chunk: int) -> int:
        return self.sizes.shards[chunk][self.rank]

    def _num_kept(self, chunk: int) -> int:
        """Of the chunk's pieces, those that stay on the GPU."""
        fraction = self.sizes.settings[self.rank].offload.optimizer_state_fraction
        return kept_pieces(len(state_pieces(self._owned(chunk))), fraction)

    @property
    def _is_state_in_host(self) -> bool:
        return self.sizes.settings[self.rank].offload.optimizer_state

    @cached_property
    def widened_bytes(self) -> int:
        """fp32 copies that a STEP makes of gradients that are accumulated in 16 bits.

        Of all at once, as stock does; where the step is made in parts, of one part (see
        `adapter.session_optimizer`).
        """
        offload = self.sizes.settings[self.rank].offload
        of_piece = largest_piece if offload.optimizer_state else int
        each = [
            widened_bytes(self.sizes.memory_of(chunk), of_piece(self._owned(chunk)))
            for chunk in self._chunks
        ]
        in_parts = offload.optimizer_state or offload.parameters or offload.gradients
        return max(each, default=0) if in_parts else sum(each)

    def shard_of_gradients(self, chunk: int) -> int:
        """Bytes of what the rank owns of a chunk's reduced gradients."""
        return self.sizes.memory_of(chunk).gradient_bytes(self._owned(chunk))

    @cached_property
    def for_norm(self) -> tuple[int, int]:
        """Bytes of gradients that are copied from the host for their norm, and on the GPU at most.

        One chunk's are there while the next one's come.
        """
        each = [self._returning_bytes(chunk) for chunk in self._chunks]
        return sum(each), max(map(sum, zip(each, [*each[1:], 0], strict=True)))

    def _returning_bytes(self, chunk: int) -> int:
        """Of a chunk's gradients, in the host."""
        return self.shard_of_gradients(chunk) if chunk in self.gradients_in_host else 0

    def _follow(self, position: int, action: Action) -> None:
        if action.chunk is None:
            return
        state = self._chunks.get(action.chunk)
        if state is None:
            raise self._error(action, "is not a chunk of its group")
        if action.kind is Kind.STEP:
            self._step(position, action.chunk, state)
        if action.kind in COMPUTE and (state.in_host or not state.is_unsharded):
            raise self._error(action, "has its parameters released or in host memory")
        if action.kind in _FORMS:
            self._change_form(position, action, state)
        elif action.kind in _LOCATIONS:
            self._relocate(position, action, state)

    def _step(self, position: int, chunk: int, state: _ChunkResidency) -> None:
        if not self.stepped:
            for each in self._chunks:
                self.stepped += self._stepped(each, self._pieces(each))
        state.is_changed = not state.in_host
        there = [
            self._working_set(self.stepped[at : at + 2])
            for at, unit in enumerate(self.stepped)
            if unit.chunk == chunk
        ]
        most = dict.fromkeys(max(there, key=attrgetter(name)) for name in _AMOUNTS)
        self.step_working_sets[position] = tuple(sorted(most, key=attrgetter("num_bytes")))

    def _pieces(self, chunk: int) -> list[tuple[int, int]]:
        """(elements, bytes of state that pass through) in turn; one where it stays on the GPU."""
        owned, kept = self._owned(chunk), self._num_kept(chunk)
        if not self._is_state_in_host:
            return [(owned, 0)]
        return [
            (piece, self.sizes.memory_of(chunk).state_bytes(piece) if number >= kept else 0)
            for number, piece in enumerate(state_pieces(owned))
        ]

    def _stepped(self, chunk: int, pieces: Sequence[tuple[int, int]]) -> list[SteppedUnit]:
        """Parameters in the host come with the chunk's first piece and go with its last one.

        So do gradients, which need not be copied when they go.
        """
        state, gradient_bytes = self._chunks[chunk], self._returning_bytes(chunk)
        own_bytes = state.shard_bytes if state.in_host else 0
        last = len(pieces) - 1
        return [
            SteppedUnit(
                chunk=chunk,
                elements=elements,
                state_bytes=state_bytes,
                in_bytes=state_bytes + (own_bytes + gradient_bytes if number == 0 else 0),
                out_bytes=state_bytes + (own_bytes if number == last else 0),
            )
            for number, (elements, state_bytes) in enumerate(pieces)
        ]

    def _working_set(self, units: Sequence[SteppedUnit]) -> StepWorkingSet:
        """What these have on the GPU together."""
        chunks = {unit.chunk for unit in units}
        states = (self._chunks[chunk] for chunk in chunks)
        return StepWorkingSet(
            parameter_bytes=sum(state.shard_bytes for state in states if state.in_host),
            state_bytes=sum(unit.state_bytes for unit in units),
            gradient_bytes=sum(map(self._returning_bytes, chunks)),
        )

    def _change_form(self, position: int, action: Action, state: _ChunkResidency) -> None:
        if state.in_host:
            raise self._error(action, "has its parameters in host memory")
        before = state.on_gpu_bytes
        state.is_unsharded = action.kind is Kind.UNSHARD
        if action.kind is Kind.RESHARD:
            assert action.chunk is not None
            self.resharded.add(action.chunk)
        self.moves[position] = Move(num_bytes=state.on_gpu_bytes - before)

    def _relocate(self, position: int, action: Action, state: _ChunkResidency) -> None:
        if not self.sizes.settings[self.rank].offload.parameters:
            raise self._error(action, "is of a rank whose offload setting does not name them")
        before = state.on_gpu_bytes
        out = action.kind is Kind.OFFLOAD
        copies = state.is_changed if out else state.in_host
        state.in_host = out
        state.is_changed = False
        self.moves[position] = Move(
            num_bytes=state.on_gpu_bytes - before, copied_bytes=state.form_bytes if copies else 0
        )

    def _error(self, action: Action, what: str) -> SimulationError:
        return SimulationError(f"rank {self.rank} runs {action}, but chunk {action.chunk} {what}")
