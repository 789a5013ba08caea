"""Where a rank's parameters and optimizer state are: whole or a shard, on the GPU or in the host.

A list is taken to be repeated: what it leaves behind is what it starts from. So a chunk starts as
a shard if RELEASE is the last of its GATHERs and RELEASEs, and in host memory if OFFLOAD is the
last of its OFFLOADs and FETCHes; with neither it is whole, and on the GPU.

OFFLOAD and FETCH move what the group's `offload` setting names: with `parameters` the parameters
(whole, or the shard after a RELEASE), with `optimizer_state` the rank's shard of the state. State
that is offloaded by the setting in a list without these actions stays in the host all the time,
and passes through the GPU piece by piece during STEP. Parameters that are offloaded by the setting
in a list without these actions stay on the GPU: the list is what is executed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from zorse_megatron.schedules.actions import COMPUTE, Action, Kind
from zorse_megatron.simulate.errors import SimulationError
from zorse_megatron.simulate.sizes import Sizes

_MOVES = frozenset({Kind.GATHER, Kind.RELEASE, Kind.OFFLOAD, Kind.FETCH})


@dataclass(frozen=True, kw_only=True)
class Move:
    """What one action changes on the GPU, and what it copies over the host link."""

    parameter_bytes: int = 0
    state_bytes: int = 0

    @property
    def copied_bytes(self) -> int:
        """Bytes of an OFFLOAD or a FETCH."""
        return abs(self.parameter_bytes) + abs(self.state_bytes)


@dataclass(kw_only=True)
class _ChunkState:
    whole_bytes: int
    shard_bytes: int
    state_bytes: int
    moves_parameters: bool
    moves_state: bool
    is_whole: bool
    in_host: bool

    @property
    def form_bytes(self) -> int:
        """Parameters in the form that they have now, wherever they are."""
        return self.whole_bytes if self.is_whole else self.shard_bytes

    @property
    def on_gpu(self) -> tuple[int, int]:
        """(parameters, state) in bytes."""
        parameters_away = self.in_host and self.moves_parameters
        state_away = self.in_host and self.moves_state
        return 0 if parameters_away else self.form_bytes, 0 if state_away else self.state_bytes


class Residency:
    """Follows one rank's list; raises SimulationError where it uses what is not there."""

    def __init__(self, sizes: Sizes, rank: int, actions: Sequence[Action]) -> None:
        self.rank = rank
        self.sizes = sizes
        self.streamed_bytes = 0
        """State that lives in the host and passes through the GPU during STEP."""
        self.moves: dict[int, Move] = {}
        """Position in the list -> what the action moves."""
        self.released: set[int] = set()
        """Chunks that the list drops the whole parameters of."""
        last = {
            (action.chunk, action.kind in (Kind.GATHER, Kind.RELEASE)): action.kind
            for action in actions
            if action.kind in _MOVES
        }
        self._chunks = {chunk: self._first(chunk, last) for chunk in sizes.chunks(rank)}
        start = [state.on_gpu for state in self._chunks.values()]
        self.start_parameter_bytes = sum(parameters for parameters, _ in start)
        self.start_state_bytes = sum(state for _, state in start)
        if last:  # today's lists only have a GATHER at the end, but it may change
            for position, action in enumerate(actions):
                self._follow(position, action)

    def _first(self, chunk: int, last: dict[tuple[int | None, bool], Kind]) -> _ChunkState:
        memory = self.sizes.memory
        shard = self.sizes.shards[chunk][self.rank]
        offload = self.sizes.group(self.rank).offload
        state_bytes = memory.state_bytes(shard)
        copied = (chunk, False) in last
        if offload is not None and offload.optimizer_state and not copied:
            self.streamed_bytes += state_bytes
            state_bytes = 0
        return _ChunkState(
            whole_bytes=memory.parameter_bytes(self.sizes.parameters[chunk]),
            shard_bytes=memory.parameter_bytes(shard),
            state_bytes=state_bytes,
            moves_parameters=offload is not None and offload.parameters,
            moves_state=offload is not None and offload.optimizer_state,
            is_whole=last.get((chunk, True)) is not Kind.RELEASE,
            in_host=last.get((chunk, False)) is Kind.OFFLOAD,
        )

    def _follow(self, position: int, action: Action) -> None:
        if action.chunk is None:
            return
        state = self._chunks.get(action.chunk)
        if state is None:
            raise self._error(action, "is not a chunk of its group")
        parameters_away = state.in_host and state.moves_parameters
        if action.kind in COMPUTE and (parameters_away or not state.is_whole):
            raise self._error(action, "has its parameters released or in host memory")
        if action.kind not in _MOVES:
            return
        before = state.on_gpu
        if action.kind in (Kind.GATHER, Kind.RELEASE):
            if parameters_away:
                raise self._error(action, "has its parameters in host memory")
            state.is_whole = action.kind is Kind.GATHER
        else:
            if not (state.moves_parameters or state.moves_state):
                raise self._error(action, "is in a group whose offload setting names nothing")
            state.in_host = action.kind is Kind.OFFLOAD
        if action.kind is Kind.RELEASE:
            self.released.add(action.chunk)
        after = state.on_gpu
        self.moves[position] = Move(
            parameter_bytes=after[0] - before[0], state_bytes=after[1] - before[1]
        )

    def _error(self, action: Action, what: str) -> SimulationError:
        return SimulationError(f"rank {self.rank} runs {action}, but chunk {action.chunk} {what}")
