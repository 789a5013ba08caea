"""Training state that waits in host memory: fetched, stepped and sent back piece by piece.

Adam's rule is the same for every element, so pieces of the chunks' shards can be stepped one after
the other with the same result, and the state of two pieces at most is on the device: the one that
is stepped and the one that is fetched meanwhile. Shards of parameters that wait in the host, too,
come and go chunk by chunk.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from zorse_megatron.adapter.checkpoint.saved_groups import allocate_state
from zorse_megatron.adapter.optimizer.chunk_steps import ChunkSteps
from zorse_megatron.adapter.optimizer.state_pieces import ChunkState, OwnedShard, StatePiece
from zorse_megatron.adapter.optimizer.streamed_gradients import (
    StreamedGradients,
    gradients_in_host,
)
from zorse_megatron.runtime.gradients_in_host import GradientsInHost
from zorse_megatron.runtime.host_link import HostBacked, HostLink


@dataclass(frozen=True, kw_only=True)
class _Unit:
    """What is stepped at once."""

    chunk: Any
    piece: StatePiece | None
    """None: all of the chunk's shards, with their state on the device."""
    needed: list[HostBacked]
    """Memory that is in the host when the step begins."""
    leaving: list[HostBacked]
    """The part that no later unit needs."""
    gradients: GradientsInHost | None = None
    """The chunk's, where they may wait in the host."""
    is_last: bool = True
    """Whether it is the chunk's last."""


class HostState:
    """The host's part of what one rank's optimizer owns; made when the optimizer is.

    Parameters that wait in the host are those that the list has offloaded when the step comes.
    """

    def __init__(
        self,
        optimizer: Any,
        link: HostLink,
        *,
        optimizer_state: bool,
        gradients: StreamedGradients | None = None,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """`optimizer_state`: whether main parameters and moments wait in the host, too.

        They are made there, chunk by chunk. `gradients`: where these may wait in the host, too.

        `on_change`: called within a step, whenever as much is on the device as there will be until
        the next call.
        """
        self.optimizer = optimizer
        self.on_change = on_change
        self.gradients = gradients
        self.inner = optimizer.optimizer
        self.steps: ChunkSteps = optimizer.chunk_steps
        self._to_step: list[_Unit] = []
        self._leaving: list[HostBacked] = []
        """Sent back, but not let go of yet."""
        self.chunks: list[Any] = list(optimizer.model_chunks)
        self._shards: dict[int, list[OwnedShard]] = {id(chunk): [] for chunk in self.chunks}
        group_of = {
            id(shard): number
            for number, group in enumerate(self.inner.param_groups)
            for shard in group["params"]
        }
        for chunk, parameter, (start, _), shard in optimizer.owned_shards():
            owned = OwnedShard(
                parameter=parameter, start=start, tensor=shard, group=group_of[id(shard)]
            )
            self._shards[id(chunk)].append(owned)
        self._state: dict[int, ChunkState] = {}
        if optimizer_state:
            self._state = {id(chunk): self._state_of(chunk, link) for chunk in self.chunks}
        link.expect_state(self)

    def _state_of(self, chunk: Any, link: HostLink) -> ChunkState:
        with self.steps.only(chunk):
            return ChunkState(
                self._shards[id(chunk)],
                self.inner,
                link,
                allocate=partial(allocate_state, self.optimizer, device=link.device),
            )

    @property
    def memories(self) -> list[HostBacked]:
        """All optimizer state that waits in the host."""
        return [memory for state in self._state.values() for memory in state.whole]

    @property
    def states(self) -> list[ChunkState]:
        """Optimizer state in the host, by chunk; none where it stays on the device."""
        return list(self._state.values())

    @property
    def num_elements(self) -> int:
        """What a step changes."""
        return sum(shard.tensor.numel() for shards in self._shards.values() for shard in shards)

    def begin(self) -> None:
        """An update begins; `step_chunk` follows for each chunk in turn."""
        self.steps.begin()
        self._to_step = [unit for chunk in self.chunks for unit in self._units(chunk)]

    def step_chunk(self, chunk: Any) -> None:
        """The part of an update that is the chunk's."""
        while self._to_step and self._to_step[0].chunk is chunk:
            # Before the next one comes, so that no three are there. While it leaves, this one is
            # still coming: both directions of the link stay in use.
            _let_go(self._leaving)
            unit, *following = self._to_step
            for each in (unit, *following[:1]):
                if each.gradients is not None:
                    each.gradients.start_back()
                for memory in each.needed:
                    memory.start_back()
            self.on_change()
            if unit.gradients is not None:
                unit.gradients.wait_until_back()
            for memory in unit.needed:
                memory.wait_until_back()
            with self.steps.counting_one():
                self._step(unit)
            self._send(unit)
            self._leaving, self._to_step = unit.leaving, following
        if not self._to_step:
            _let_go(self._leaving)
            self._leaving = []

    @property
    def passing_bytes(self) -> int:
        """Optimizer state that is on the device to be stepped."""
        pieces = [piece for state in self._state.values() for piece in state.pieces]
        return sum(memory.storage.nbytes() for piece in pieces for memory in piece.memories)

    def _units(self, chunk: Any) -> Iterator[_Unit]:
        parameters = self._parameters_away(chunk)
        gradients = None if self.gradients is None else gradients_in_host(chunk)
        state = self._state.get(id(chunk))
        if state is None:
            yield _Unit(
                chunk=chunk,
                piece=None,
                needed=parameters,
                leaving=parameters,
                gradients=gradients,
            )
            return
        for piece in state.pieces:
            is_last = piece is state.pieces[-1]
            yield _Unit(
                chunk=chunk,
                piece=piece,
                needed=[*parameters, *piece.memories],
                leaving=[*(parameters if is_last else []), *piece.memories],
                gradients=gradients,
                is_last=is_last,
            )

    def _step(self, unit: _Unit) -> None:
        if unit.piece is None:
            with self.steps.only(unit.chunk):
                self._give(unit, [each.tensor for each in self._shards[id(unit.chunk)]])
                self.inner.step()
            self.optimizer.copy_main_to_model(unit.chunk)
            return
        with unit.piece.alone(self.inner) as tensors:
            self._give(unit, tensors)
            self.inner.step()
        unit.piece.copy_main_to(unit.chunk)
        if unit.chunk.shards is not None:
            unit.chunk.shards.mark_changed()

    def _give(self, unit: _Unit, tensors: Sequence[torch.Tensor]) -> None:
        """Give what is stepped the gradients that have come for it."""
        if self.gradients is None:
            return
        if unit.piece is None:
            owned = self._shards[id(unit.chunk)]
            places = [(one.parameter, one.start, one.tensor.numel()) for one in owned]
        else:
            places = [
                (one.shard.parameter, one.shard.start + one.start, one.num_elements)
                for one in unit.piece.slices
            ]
        self.gradients.give(
            unit.chunk,
            [
                (tensor, parameter, start, start + count)
                for tensor, (parameter, start, count) in zip(tensors, places, strict=True)
            ],
        )

    def _send(self, unit: _Unit) -> None:
        if unit.gradients is not None and unit.is_last:
            unit.gradients.drop()
        for memory in unit.leaving:
            memory.send()
        if unit.chunk.shards is not None:
            for buffer in unit.chunk.shards.parameters:
                if buffer.memory in unit.leaving:
                    buffer.changed = False

    def _parameters_away(self, chunk: Any) -> list[HostBacked]:
        """Shards of the chunk's parameters that are in the host now."""
        buffers = chunk.shards.parameters if chunk.shards is not None else []
        shards = [buffer.memory for buffer in buffers if buffer.in_shard]
        return [m for m in shards if m is not None and m.is_away and m.num_bytes]


def _let_go(memories: list[HostBacked]) -> None:
    for memory in memories:
        memory.let_go()
