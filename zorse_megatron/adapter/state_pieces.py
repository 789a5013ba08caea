"""Optimizer state in host memory, and the pieces of it that are stepped one after the other.

Adam's rule is the same for every element, so a piece may begin and end anywhere in a parameter:
how much is on the device at a time does not depend on the model.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from zorse_megatron.runtime.host_memory import HostBacked, HostLink
from zorse_megatron.schedules.shards import state_pieces

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
        """Main parameters of the slices that have them, one behind the other."""

    @property
    def num_elements(self) -> int:
        """Of all slices."""
        return sum(each.num_elements for each in self.slices)

    @property
    def num_main(self) -> int:
        """Of slices with main parameters."""
        return sum(each.num_elements for each in self.slices if each.shard.has_main)

    @contextmanager
    def alone(self, inner: Any) -> Iterator[None]:
        """Within the block, the inner optimizer has this piece only; its memory must be there."""
        groups, state = inner.param_groups, inner.state
        everything = [group["params"] for group in groups]
        tensors = [self._tensor(each) for each in self.slices]
        for number, group in enumerate(groups):
            of_group = zip(tensors, self.slices, strict=True)
            group["params"] = [t for t, each in of_group if each.shard.group == number]
        for tensor, each in zip(tensors, self.slices, strict=True):
            state[tensor] = self._state(each, state[each.shard.tensor])
        try:
            yield
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

    def __init__(self, shards: Sequence[OwnedShard], inner: Any, link: HostLink) -> None:
        """Make flat tensors of moments and main parameters, and send them away."""
        self.inner = inner
        self.link = link
        self.shards = tuple(shards)
        moments = {name: self._flat_moment(name) for name in self._moment_names()}
        mains = self._flat_main()
        sent = {name: self._sent(flat) for name, flat in moments.items()}
        sent_mains = [self._sent(flat) for flat in mains]
        self.whole = [*sent.values(), *sent_mains]
        """All of it; used where everything must be on the device, as for a checkpoint."""
        self.pieces = [StatePiece(slices) for slices in _cut(self.shards)]
        first = first_main = 0
        for piece in self.pieces:
            for name, memory in sent.items():
                like = moments[name]
                piece.moments[name] = _part(piece, memory, like, first, piece.num_elements)
            if piece.num_main:
                piece.main = _part(piece, sent_mains[0], mains[0], first_main, piece.num_main)
            first, first_main = first + piece.num_elements, first_main + piece.num_main

    def _moment_names(self) -> list[str]:
        of_shards = ((shard.tensor, self.inner.state[shard.tensor]) for shard in self.shards)
        return sorted(
            {n for tensor, state in of_shards for n, v in state.items() if _is_moment(v, tensor)}
        )

    def _flat_moment(self, name: str) -> torch.Tensor:
        state, tensors = self.inner.state, [shard.tensor for shard in self.shards]
        flat = torch.cat([state[tensor][name].view(-1) for tensor in tensors])
        for tensor, part in zip(tensors, _parts(flat, tensors), strict=True):
            state[tensor][name] = part.view_as(tensor)
        return flat

    def _flat_main(self) -> list[torch.Tensor]:
        """One, or none where all parameters are float32 themselves."""
        tensors = [shard.tensor for shard in self.shards if shard.has_main]
        if not tensors:
            return []
        flat = torch.cat([tensor.detach().view(-1) for tensor in tensors])
        for tensor, part in zip(tensors, _parts(flat, tensors), strict=True):
            tensor.data = part.view_as(tensor)
        return [flat]

    def _sent(self, flat: torch.Tensor) -> HostBacked:
        memory = HostBacked(flat, self.link, _CATEGORY)
        memory.send()
        memory.let_go(wait=True)
        return memory


def _piece_sizes(shards: Sequence[OwnedShard]) -> Sequence[int]:
    """Elements of each piece."""
    return state_pieces(sum(shard.tensor.numel() for shard in shards))


def _cut(shards: Sequence[OwnedShard]) -> Iterator[list[_Slice]]:
    """The slices of each piece; one piece without any where there are no shards."""
    todo = [(shard, 0) for shard in reversed(shards)]
    for size in _piece_sizes(shards):
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


def _part(
    piece: StatePiece, whole: HostBacked, like: torch.Tensor, first: int, count: int
) -> torch.Tensor:
    """Elements of a flat tensor that waits in the host, in memory of their own."""
    tensor = like.new_empty(count)
    piece.memories.append(whole.part(tensor, first * tensor.element_size()))
    return tensor


def _parts(flat: torch.Tensor, like: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return flat.split([tensor.numel() for tensor in like])


def _is_moment(value: Any, shard: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == shard.shape and value.ndim > 0


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
