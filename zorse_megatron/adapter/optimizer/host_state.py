"""Training state that waits in host memory: fetched, stepped and sent back piece by piece.

An update is the same for every element, with Adam as with SGD, so pieces of the chunks' shards can
be stepped one after the other with the same result, and the state of two pieces at most is on the
device: the one that is stepped and the one that is fetched meanwhile. If a fraction is to wait, the
other pieces stay on the device, until somebody asks for what the host has of them. Shards of
parameters that wait in the host, too, come and go chunk by chunk.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from zorse_megatron.adapter.checkpoint.saved_optimizer import allocate_state
from zorse_megatron.adapter.optimizer.chunk_steps import ChunkSteps, stepping
from zorse_megatron.adapter.optimizer.streamed_gradients import StreamedGradients, gradients_in_host
from zorse_megatron.runtime.host_link import HostBacked, HostLink, joined_in_host
from zorse_megatron.runtime.offload import GradientsInHost
from zorse_megatron.schedule.shards import kept_pieces

# Optimizer state in host memory, and the pieces of it that are stepped one after the other.
#
# An update is the same for every element, so a piece may begin and end anywhere in a parameter: how
# much is on the device at a time does not depend on the model.


_CATEGORY = "optimizer state"


@dataclass(frozen=True, kw_only=True, eq=False)
class OwnedShard:
    """What the inner optimizer steps for one model parameter."""

    parameter: torch.nn.Parameter
    start: int
    """First owned element of the parameter."""
    tensor: torch.Tensor
    """[owned elements], float32."""
    group: int
    """The inner optimizer's parameter group."""

    @property
    def has_main(self) -> bool:
        """Whether the tensor is a copy in higher precision, which waits in the host, too."""
        return self.parameter.dtype != torch.float32


@dataclass(frozen=True, kw_only=True, eq=False)
class _Slice:
    """Elements of a shard's tensor that are in one piece."""

    shard: OwnedShard
    start: int
    stop: int
    at: int
    """Where they begin in the piece."""
    main_at: int
    """Where they begin among the piece's main parameters."""

    @property
    def num_elements(self) -> int:
        return self.stop - self.start

    @property
    def is_end(self) -> bool:
        """Whether the shard ends here."""
        return self.stop == self.shard.tensor.numel()


class StatePiece:
    """Consecutive elements of a chunk's shards with their state."""

    def __init__(self, slices: Sequence[_Slice]) -> None:
        self.slices = tuple(slices)
        self.memories: list[HostBacked] = []
        """What must be on the device for the piece to be stepped."""
        self.moments: dict[str, torch.Tensor] = {}
        """Name -> one value for each element of the piece."""
        self.main: torch.Tensor | None = None
        """Main parameters of the slices that have them, one after the other."""

    @property
    def num_elements(self) -> int:
        """Elements of all slices."""
        return sum(each.num_elements for each in self.slices)

    @property
    def num_main(self) -> int:
        """Elements of the slices with main parameters."""
        return sum(each.num_elements for each in self.slices if each.shard.has_main)

    @contextmanager
    def alone(self, inner: Any) -> Iterator[list[torch.Tensor]]:
        """Within the block, the inner optimizer has this piece only; its memory must be there.

        Yields what is stepped, by slices.
        """
        state = inner.state
        by_group: list[list[torch.Tensor]] = [[] for _ in inner.param_groups]
        tensors = [self._tensor(each) for each in self.slices]
        for tensor, each in zip(tensors, self.slices, strict=True):
            by_group[each.shard.group].append(tensor)
            state[tensor] = self._state(each, state[each.shard.tensor])
        try:
            with stepping(inner, by_group):
                yield tensors
        finally:
            for tensor, each in zip(tensors, self.slices, strict=True):
                found = state.pop(tensor)
                if each.is_end:  # counters are the same in all slices of a shard
                    whole = {n: v for n, v in found.items() if n not in self.moments}
                    state[each.shard.tensor].update(whole)

    def copy_main_to(self, chunk: Any) -> None:
        """Write the stepped parameters to where the chunk keeps its own."""
        for each in self.slices:
            first = each.shard.start
            kept = chunk.parameter_piece(
                each.shard.parameter, first + each.start, first + each.stop
            )
            kept.copy_(self._tensor(each))

    def _tensor(self, each: _Slice) -> torch.Tensor:
        """What is stepped for a slice, with its gradient."""
        shard = each.shard.tensor
        if each.shard.has_main:
            assert self.main is not None, "the piece has main parameters"
            tensor = self.main[each.main_at : each.main_at + each.num_elements]
        else:
            tensor = shard.detach().view(-1)[each.start : each.stop]
        if shard.grad is not None:
            tensor.grad = shard.grad.view(-1)[each.start : each.stop]
        return tensor

    def _state(self, each: _Slice, of_shard: dict) -> dict:
        """Its part of the moments, and a copy of what counts for the shard as a whole."""
        return {
            name: self.moments[name][each.at : each.at + each.num_elements]
            if name in self.moments
            else _copied(value)
            for name, value in of_shard.items()
        }


class ChunkState:
    """The state of one rank's shards of a chunk in host memory: as a whole, and in pieces."""

    def __init__(
        self,
        shards: Sequence[OwnedShard],
        inner: Any,
        link: HostLink,
        allocate: Callable[[], None],
        *,
        fraction: float | None,
    ) -> None:
        """Make flat tensors of moments and main parameters, in the host.

        `allocate` gives the shards their state where they have none yet; it is made in the host.
        `fraction`: the part that is there between steps; None: all.
        """
        self.inner = inner
        self.link = link
        self.shards = tuple(shards)
        moments, mains = self._make(allocate)
        self.whole = [flat.memory for flat in (*moments.values(), *mains)]
        """All of it."""
        self.pieces = [
            StatePiece(slices) for slices in _cut(self.shards, link.piece_sizes(self.shards))
        ]
        self.kept = self.pieces[: kept_pieces(len(self.pieces), fraction)]
        first = first_main = 0
        for piece in self.pieces:
            for name, flat in moments.items():
                piece.moments[name] = flat.part(first, piece.num_elements, piece)
            for flat in mains if piece.num_main else ():
                piece.main = flat.part(first_main, piece.num_main, piece)
            first, first_main = first + piece.num_elements, first_main + piece.num_main

    @property
    def stays(self) -> list[HostBacked]:
        """What is on the device between steps, unless somebody has asked for it in the host."""
        return [memory for piece in self.kept for memory in piece.memories]

    def _make(self, allocate: Callable[[], None]) -> tuple[dict[str, "_Flat"], list["_Flat"]]:
        """Moments by name, and main parameters: one, or none where all are float32 themselves."""
        places = [shard.tensor.data for shard in self.shards]
        for shard in self.shards:
            value = shard.tensor.data
            shard.tensor.data = value.cpu() if shard.has_main else torch.empty(value.shape)
        allocate()
        moments = {name: self._moment(name) for name in self._moment_names()}
        with_main = [shard.tensor for shard in self.shards if shard.has_main]
        mains = [_Flat(with_main, self.link)] if with_main else []
        for main in mains:
            for tensor, part in zip(with_main, main.parts, strict=True):
                tensor.data = part
        for shard, place in zip(self.shards, places, strict=True):
            if not shard.has_main:
                shard.tensor.data = place
        return moments, mains

    def _moment_names(self) -> list[str]:
        of_shards = ((shard.tensor, self.inner.state[shard.tensor]) for shard in self.shards)
        return sorted(
            {n for tensor, state in of_shards for n, v in state.items() if _is_moment(v, tensor)}
        )

    def _moment(self, name: str) -> "_Flat":
        states = [self.inner.state[shard.tensor] for shard in self.shards]
        moment = _Flat([state[name] for state in states], self.link)
        for state, part in zip(states, moment.parts, strict=True):
            state[name] = part
        return moment


class _Flat:
    """Tensors of one type, one after the other, that wait in the host."""

    def __init__(self, values: Sequence[torch.Tensor], link: HostLink) -> None:
        """Takes over what is in `values`; `parts` are of their shapes and on the device."""
        joined = joined_in_host(values)
        self.tensor = torch.empty_like(joined, device=link.device)
        self.memory = HostBacked(self.tensor, link, _CATEGORY)
        parts = self.tensor.split([value.numel() for value in values])
        self.parts = [p.view(v.shape) for p, v in zip(parts, values, strict=True)]
        self.memory.start_in_host(joined)

    def part(self, first: int, count: int, holder: StatePiece) -> torch.Tensor:
        """Elements in memory of their own, which a piece must have on the device to be stepped."""
        tensor = self.tensor.new_empty(count)
        start_bytes = first * tensor.element_size()
        holder.memories.append(self.memory.part(tensor, start_bytes))
        return tensor


def _cut(shards: Sequence[OwnedShard], sizes: Sequence[int]) -> Iterator[list[_Slice]]:
    """The slices of each piece; one piece without any where there are no shards."""
    todo = [(shard, 0) for shard in reversed(shards)]
    for size in sizes:
        slices: list[_Slice] = []
        at = main_at = 0
        while at < size or (todo and not todo[-1][0].tensor.numel()):
            shard, start = todo.pop()
            stop = min(shard.tensor.numel(), start + size - at)
            slices.append(_Slice(shard=shard, start=start, stop=stop, at=at, main_at=main_at))
            at += stop - start
            main_at += (stop - start) * shard.has_main
            if stop < shard.tensor.numel():
                todo.append((shard, stop))
        yield slices


def _is_moment(value: Any, shard: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == shard.shape and value.ndim > 0


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


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
    gradients: GradientsInHost | None
    """The chunk's, where they may wait in the host."""
    is_last: bool
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
        fraction: float | None,
        gradients: StreamedGradients | None,
        on_change: Callable[[], None],
    ) -> None:
        """`optimizer_state`: whether main parameters and moments wait in the host, too, or a
        `fraction` of them.

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
        for chunk, parameter, (start, _), shard in optimizer.owned_shards:
            owned = OwnedShard(
                parameter=parameter, start=start, tensor=shard, group=group_of[id(shard)]
            )
            self._shards[id(chunk)].append(owned)
        self._state: dict[int, ChunkState] = {}
        if optimizer_state:
            self._state = {id(each): self._state_of(each, link, fraction) for each in self.chunks}
        link.expect_state(self)
        for state in self.states:
            for memory in state.stays:
                memory.start_back()

    def _state_of(self, chunk: Any, link: HostLink, fraction: float | None) -> ChunkState:
        with self.steps.only(chunk):
            return ChunkState(
                self._shards[id(chunk)],
                self.inner,
                link,
                allocate=partial(allocate_state, self.optimizer, device=link.device),
                fraction=fraction,
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
        pieces = [None] if state is None else state.pieces
        for piece in pieces:
            is_last = piece is pieces[-1]
            of_piece = [] if piece is None else piece.memories
            stays = state is not None and piece in state.kept
            yield _Unit(
                chunk=chunk,
                piece=piece,
                needed=[*parameters, *of_piece],
                leaving=[*(parameters if is_last else []), *([] if stays else of_piece)],
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
