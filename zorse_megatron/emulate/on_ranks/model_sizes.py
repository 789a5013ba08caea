"""Sizes of the real model, seen from the tensors of the tiny one that stands for it.

The tiny model has as many layers as the real one, so that both are cut in the same way. Each of its
parameters counts as (real / tiny) parameters, with the quotient of its part of the model: layers,
embedding or head. An activation [sequence, samples, hidden] counts as the real one of as many
samples, and a part of its sequence as that part. For what TP groups communicate see `tensor_sizes`.
"""

import bisect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from zorse_megatron.adapter.model.chunk_view import (
    ChunkView,
    CountedSection,
    FlatBuffer,
    owned_shares,
)
from zorse_megatron.emulate.emulated_job import EmulatedJob
from zorse_megatron.emulate.on_ranks.tensor_sizes import TensorSizes, TpSizes
from zorse_megatron.runtime.mixed_tp_exchange import Exchanged
from zorse_megatron.schedule.shards import shard_bounds


@dataclass(frozen=True, kw_only=True)
class _Scale:
    """How many real parameters lie before each element of a flat buffer."""

    origin: int
    """The buffer's place in its storage."""
    bounds: tuple[int, ...]
    before: tuple[float, ...]
    slopes: tuple[float, ...]
    to_bytes: Callable[[int], int]

    def upto(self, element: int) -> float:
        at = bisect.bisect_right(self.bounds, element) - 1
        if at < 0:
            return 0.0
        return self.before[at] + self.slopes[at] * (element - self.bounds[at])

    def parameters(self, start: int, stop: int) -> int:
        return round(self.upto(stop) - self.upto(start))


class ModelSizes(TensorSizes):
    """Those of one rank of a training run."""

    def __init__(self, job: EmulatedJob, rank: int) -> None:
        self.memory = job.costs[rank].memory
        self.tp_sizes = None if job.tp_groups is None else TpSizes(job, job.tp_groups, rank)
        """Where the plan has TP groups."""
        self.on_operation: Callable[[], None] = lambda: None
        """Called when gradients are about to be summed or parameters gathered."""
        self._boundary = job.sequence_length, job.hidden_size
        self._scales: dict[int, _Scale] = {}
        """By storage, which stays the same object while its memory comes and goes."""
        self._buffers: dict[tuple[int, int], _Scale] = {}
        self._tied_factor = 1.0
        self._element_bytes: int | None = None
        """Size of the tiny model's elements; None while it has no parameters."""

    def add(self, chunk: ChunkView) -> None:
        """Learn the buffers of a chunk."""
        if self.tp_sizes is not None:
            self.tp_sizes.add(chunk)
        self._element_bytes = next(chunk.wrapped.parameters()).element_size()
        real = self.real_parameters(chunk)
        # A rank may hold none of the embedding.
        factors = {
            section: real[section] / count if count else 0.0
            for section, count in chunk.num_parameters.items()
        }
        self._tied_factor = factors.get("tied table", self._tied_factor)
        for number, buffer in enumerate(chunk.buffers):
            pairs = [
                (buffer.gradients, self.memory.gradient_bytes),
                (buffer.parameters, self.memory.parameter_bytes),
            ]
            for tensor, to_bytes in pairs:
                if tensor is not None:
                    scale = _scale(buffer, tensor, factors, to_bytes)
                    self._scales[tensor.untyped_storage()._cdata] = scale
                    self._buffers.setdefault((id(chunk), number), scale)

    def real_parameters(self, chunk: ChunkView) -> dict[CountedSection, int]:
        """Number of parameters of each section of a chunk in the real model."""
        memory = self.memory
        own_head = memory.head_parameters(tied_on_same_rank=True)
        table = memory.head_parameters(tied_on_same_rank=False) - own_head
        real: dict[CountedSection, int] = {"layer": len(chunk.layers) * memory.layer_parameters()}
        if "tied table" in chunk.num_parameters:
            real["tied table"] = table
        if chunk.embedding is not None:
            real["embedding"] = memory.embedding_parameters() - table
        if chunk.output_layer is not None:
            real["head"] = own_head
        return real

    def owned_parameters(self, chunk: ChunkView) -> int:
        """Real parameters of a chunk that this rank's optimizer steps."""
        unlike = None if self.tp_sizes is None else self.tp_sizes.owned_parameters(chunk)
        if unlike is not None:
            return unlike
        return sum(
            round(self._buffers[id(chunk), owned.buffer].parameters(*owned.bucket) * owned.share)
            for owned in owned_shares(chunk)
        )

    def buffer_bytes(self, tensor: torch.Tensor) -> int:
        """A known buffer's piece counts as in the real model, anything else as it is."""
        scale = self._scales.get(tensor.untyped_storage()._cdata)
        if scale is None:
            return tensor.nbytes
        start = int(tensor.storage_offset()) - scale.origin
        return scale.to_bytes(scale.parameters(start, start + tensor.numel()))

    def part_bytes(self, parts: Sequence[torch.Tensor]) -> list[int]:
        """The real bytes of neighbouring pieces, divided in proportion to the tiny ones.

        So each rank owns as large a share as in the real model, where each part of the model is
        another share of the whole.
        """
        total = sum(map(self.buffer_bytes, parts))
        counts = [part.numel() for part in parts]
        if len(set(counts)) == 1:
            return [-(-total // len(parts))] * len(parts)
        return [stop - start for start, stop in shard_bounds(total, counts)]

    def message_bytes(self, tensor: torch.Tensor) -> int:
        """Activations, and gradients of the tied embedding, count as in the real model."""
        if tensor.untyped_storage()._cdata in self._scales:
            return self.buffer_bytes(tensor)
        length, hidden = self._boundary
        if tensor.dim() == 3 and tensor.shape[2] == hidden:
            own = self._element_bytes or tensor.element_size()
            memory = self.memory if self.tp_sizes is None else self.tp_sizes.memory
            whole = memory.boundary_bytes(tensor.shape[1]) * tensor.shape[0] // length
            # What crosses to a group that computes in another type is in the narrower of the two.
            return whole * tensor.element_size() // own
        if tensor.dim() == 1 and tensor.is_floating_point():
            # A shard that left its buffer: the only flat messages are the tied embedding's.
            return self.memory.gradient_bytes(round(tensor.numel() * self._tied_factor))
        return tensor.nbytes

    def is_tp_group(self, ranks: Sequence[int]) -> bool:
        """Whether these ranks are this rank's tensor-parallel group."""
        return (
            self.tp_sizes is not None
            and self.tp_sizes.degree > 1
            and tuple(ranks) == self.tp_sizes.ranks
        )

    def inside_bytes(self, tensor: torch.Tensor) -> int | None:
        """Of what the TP group communicates; None: it takes no time. Known buffers count as
        always."""
        if tensor.untyped_storage()._cdata in self._scales:
            return self.buffer_bytes(tensor)
        assert self.tp_sizes is not None
        return self.tp_sizes.inside_bytes(tensor)

    def activation_bytes(self, num_elements: int) -> int:
        """Of an activation of so many elements."""
        assert self.tp_sizes is not None
        return self.tp_sizes.activation_bytes(num_elements)

    def exchange_bytes(self, exchanged: Exchanged) -> dict[tuple[int, int], int]:
        """(source, target) -> what one sends the other in an exchange of parts."""
        assert self.tp_sizes is not None
        return self.tp_sizes.exchange_bytes(exchanged)


def _scale(
    buffer: FlatBuffer,
    tensor: torch.Tensor,
    factors: dict[CountedSection, float],
    to_bytes: Callable[[int], int],
) -> _Scale:
    bounds, slopes = [0], [0.0]
    for each in buffer.sections:
        bounds += [each.start, each.stop]
        slopes += [factors[each.section], 0.0]
    lengths = [stop - start for start, stop in itertools.pairwise(bounds)]
    grown = [length * slope for length, slope in zip(lengths, slopes, strict=False)]
    return _Scale(
        origin=int(tensor.storage_offset()),
        bounds=tuple(bounds),
        before=tuple(itertools.accumulate(grown, initial=0.0)),
        slopes=tuple(slopes),
        to_bytes=to_bytes,
    )
