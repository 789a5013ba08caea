"""Optimizer state in host memory, and the pieces of it that are stepped one after the other.

Adam's rule is the same for every element, so a piece may begin and end anywhere in a parameter:
how much is on the device at a time does not depend on the model.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from zorse_megatron.runtime.host_link import HostBacked, HostLink, joined_in_host

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
        groups, state = inner.param_groups, inner.state
        everything = [group["params"] for group in groups]
        tensors = [self._tensor(each) for each in self.slices]
        for number, group in enumerate(groups):
            of_group = zip(tensors, self.slices, strict=True)
            group["params"] = [t for t, each in of_group if each.shard.group == number]
        for tensor, each in zip(tensors, self.slices, strict=True):
            state[tensor] = self._state(each, state[each.shard.tensor])
        try:
            yield tensors
        finally:
            for group, parameters in zip(groups, everything, strict=True):
                group["params"] = parameters
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
    ) -> None:
        """Make flat tensors of moments and main parameters, in the host.

        `allocate` gives the shards their state where they have none yet; it is made in the host.
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
        first = first_main = 0
        for piece in self.pieces:
            for name, flat in moments.items():
                piece.moments[name] = flat.part(first, piece.num_elements, piece)
            for flat in mains if piece.num_main else ():
                piece.main = flat.part(first_main, piece.num_main, piece)
            first, first_main = first + piece.num_elements, first_main + piece.num_main

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
