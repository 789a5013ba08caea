"""Sizes of the real model, seen from the tensors of the tiny one that stands for it.

The tiny model has as many layers as the real one, so that both are cut in the same way. Each of its
parameters counts as (real / tiny) parameters, with the quotient of its part of the model: layers,
embedding or head. An activation [sequence, samples, hidden] counts as the real one of as many
samples, and a part of its sequence as that part.

Of what tensor-parallel groups communicate, an activation counts by its number of elements; what the
loss sums, and samples that are broadcast, by the number of tokens; gradients that are summed over
the TP group because all its ranks have the whole parameter, and what replicas that differ in TP
shards exchange, by how many parameters are cut in one way. Tokens on their way to experts of other
ranks count as those of the real model where routing is even, wherever the tiny one's go.
"""

import bisect
import itertools
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from zorse_megatron.costs.interface import ModelSection
from zorse_megatron.emulate.emulated_job import EmulatedJob, JobSharing, JobTpGroups
from zorse_megatron.emulate.tiny_model import LORA_RANK
from zorse_megatron.runtime.mailbox import ExchangeLog
from zorse_megatron.runtime.mixed_tp_exchange import Exchanged, MixedTpTensor
from zorse_megatron.schedule.shards import shard_bounds
from zorse_megatron.schedule.tensor_parallel_parts import UnitKind

if TYPE_CHECKING:
    from zorse_megatron.adapter.model.chunk_view import (
        ChunkView,
        CountedSection,
        FlatBuffer,
        Section,
    )


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


class ModelSizes:
    """Those of one rank of a training run."""

    def __init__(self, job: EmulatedJob, rank: int) -> None:
        self.memory = self.whole_memory = job.costs[rank].memory
        self.of_layer = partial(job.costs_of_layer, rank)
        self.computed: ModelSection | None = None
        """Which section of the model this rank computes."""
        self.on_operation: Callable[[], None] = lambda: None
        """Called when gradients are about to be summed or parameters gathered."""
        self.on_exchange: Callable[[], None] = lambda: None
        """Called when replicas that differ in TP shards begin to exchange parts."""
        self._tiny = job.sequence_length, job.hidden_size
        self._scales: dict[int, _Scale] = {}
        """By storage, which stays the same object while its memory comes and goes."""
        self._buffers: dict[tuple[int, int], _Scale] = {}
        self._tied_factor = 1.0
        self._element_bytes: int | None = None
        """Size of the tiny model's elements; None while it has no parameters."""
        self.tp_groups = job.tp_groups
        self.ranks: tuple[int, ...] = (rank,)
        """Of this rank's tensor-parallel group."""
        self.measured: frozenset[ModelSection] = frozenset()
        self.sharing: JobSharing | None = None
        """Whom this rank shares experts with."""
        self.exchanges = ExchangeLog()
        """Of tokens that this rank has sent to experts, or back."""
        if job.tp_groups is not None:
            self.sharing = job.tp_groups.sharing[rank]
            self.whole_memory = job.tp_groups.memories[rank]
            self.ranks = job.tp_groups.ranks[rank]
            self.measured = job.tp_groups.measured[rank]
        self._num_whole = 0
        """Of one layer of the tiny model: parameters that TP groups do not cut."""
        self._factors: dict[MixedTpTensor, float] = {}
        """Real elements for each of the tiny tensor's."""
        self._owned: dict[int, int] = {}
        """By chunk: real parameters that this rank owns, where replicas differ in TP shards."""
        self._chunks: list[ChunkView] = []

    @property
    def in_tp_group(self) -> bool:
        """Whether the rank computes parts of layers, with others."""
        return len(self.ranks) > 1

    def micro_batch_size(self, hidden: torch.Tensor) -> int:
        """As costs have it, of an activation [sequence, samples, hidden]."""
        return int(hidden.shape[1]) if self.sharing is None else self.sharing.size

    def at_once(self, hidden: torch.Tensor) -> int:
        """The same of what is computed before tokens leave, and of rows of experts."""
        return self.at_once_of(self.micro_batch_size(hidden))

    def at_once_of(self, size: int) -> int:
        """The same of a micro-batch of `size`."""
        return size // (1 if self.sharing is None else self.sharing.parts)

    def add(self, chunk: "ChunkView") -> None:
        """Learn the buffers of a chunk."""
        layers: Iterable[Any] = chunk.layers if self.sharing is not None else ()
        for layer in layers:
            if hasattr(layer.mlp, "token_dispatcher"):  # no dense layer
                self.exchanges = layer.mlp.token_dispatcher.place.log
        self._num_whole = chunk.num_whole or self._num_whole
        self._chunks.append(chunk)
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

    def real_parameters(self, chunk: "ChunkView") -> "dict[CountedSection, int]":
        """Number of parameters of each section of a chunk in the real model."""
        memory = self.memory
        own_head = memory.head_parameters(tied_on_same_rank=True)
        table = memory.head_parameters(tied_on_same_rank=False) - own_head
        real: dict[CountedSection, int] = {
            number: self.of_layer(number).memory.layer_parameters()
            for number in (each for each in chunk.num_parameters if isinstance(each, int))
        }
        if "tied table" in chunk.num_parameters:
            real["tied table"] = table
        if chunk.embedding is not None:
            real["embedding"] = memory.embedding_parameters() - table
        if chunk.output_layer is not None:
            real["head"] = own_head
        return real

    def owned_parameters(self, chunk: "ChunkView") -> int:
        """Real parameters of a chunk that this rank's optimizer steps."""
        from zorse_megatron.adapter.model.chunk_view import owned_shares

        if getattr(chunk.wrapped, "mixed_tp", None):
            if id(chunk) not in self._owned:
                self._learn(chunk)
            return self._owned[id(chunk)]
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
        length, hidden = self._tiny
        if tensor.dim() == 3 and tensor.shape[2] == hidden:
            own = self._element_bytes or tensor.element_size()
            whole = self.whole_memory.boundary_bytes(tensor.shape[1]) * tensor.shape[0] // length
            # What crosses to a group that computes in another type is in the narrower of the two.
            return whole * tensor.element_size() // own
        if tensor.dim() == 1 and tensor.is_floating_point():
            # A shard that left its buffer: the only flat messages are the tied embedding's.
            return self.memory.gradient_bytes(round(tensor.numel() * self._tied_factor))
        return tensor.nbytes

    # What tensor-parallel groups communicate.

    def is_tp_group(self, ranks: Sequence[int]) -> bool:
        """Whether these ranks are this rank's tensor-parallel group."""
        return self.in_tp_group and tuple(ranks) == self.ranks

    def inside_bytes(self, tensor: torch.Tensor) -> int | None:
        """Of a tensor that the TP group sums, gathers or broadcasts; None: that was measured.

        Known buffers count as always.
        """
        if tensor.untyped_storage()._cdata in self._scales:
            return self.buffer_bytes(tensor)
        if tensor.dim() == 3:  # [positions, samples, hidden], or A x of adapters
            count = tensor.numel()
            if tensor.shape[2] % self._tiny[1]:
                tiny_share = LORA_RANK / self._tiny[1]
                count = round(count * self._tp_groups.adapter_share / tiny_share)
            return None if self.computed in self.measured else self.activation_bytes(count)
        if tensor.dim() == 2:  # a number for each token
            if tensor.is_floating_point() and self.computed in self.measured:
                return None
            return tensor.nbytes * self._tp_groups.sequence_length // self._tiny[0]
        if tensor.numel() > 1 and tensor.is_floating_point():
            layers = [n for each in self._chunks for n in each.num_parameters if isinstance(n, int)]
            factor = statistics.mean(map(self._real_whole, layers)) / max(1, self._num_whole)
            return self.whole_memory.gradient_bytes(round(tensor.numel() * factor))
        return tensor.nbytes

    def activation_bytes(self, num_elements: int) -> int:
        """Of an activation of so many elements."""
        length, hidden = self._tiny
        return self.whole_memory.boundary_bytes(1) * num_elements // (length * hidden)

    def token_messages(self, rows: torch.Tensor) -> Mapping[tuple[int, int], int]:
        """(source, target) -> bytes, of one of the exchanges of ranks that share experts.

        `rows`: what this rank sends, an activation of each token or a number for each of its
        experts.
        """
        assert self.sharing is not None, "of ranks that share experts"
        messages = self.sharing.messages
        # Else numbers of experts, or weights.
        sent = messages.there if rows.shape[1] == self._tiny[1] else messages.told
        if self.exchanges.returns:
            return {pair[::-1]: num_bytes for pair, num_bytes in sent.items()}
        return sent

    def exchange_bytes(self, exchanged: Exchanged) -> dict[tuple[int, int], int]:
        """(source, target) -> what one sends the other."""
        for chunk in self._chunks:
            self.owned_parameters(chunk)
        self.on_exchange()
        elements: dict[tuple[int, int], float] = {}
        for tensor in exchanged.unit:
            for pair, count in exchanged.messages(tensor).items():
                elements[pair] = elements.get(pair, 0.0) + count * self._factors[tensor]
        memory = self.whole_memory
        to_bytes = memory.gradient_bytes if exchanged.sums else memory.parameter_bytes
        return {pair: to_bytes(round(count)) for pair, count in elements.items()}

    @property
    def _tp_groups(self) -> JobTpGroups:
        assert self.tp_groups is not None, "without TP groups nothing asks for them"
        return self.tp_groups

    def _learn(self, chunk: "ChunkView") -> None:
        from zorse_megatron.adapter.model.chunk_view import mixed_tp_parameters

        found = list(mixed_tp_parameters(chunk))
        tiny: dict[tuple[Section, UnitKind | None], int] = {}
        for each in found:
            count = torch.Size(each.tensor.part.shape).numel()
            tiny[each.section, each.kind] = tiny.get((each.section, each.kind), 0) + count
        owned = 0.0
        for each in found:
            has_table = chunk.has_own_output_table
            real = self._real(each.section, each.kind, has_table=has_table)
            self._factors[each.tensor] = real / tiny[each.section, each.kind]
            owned += each.num_owned * self._factors[each.tensor]
        self._owned[id(chunk)] = round(owned)

    def _real(self, section: "Section", kind: UnitKind | None, *, has_table: bool) -> int:
        """Parameters of the real section that are cut in this way."""
        if kind is None:
            return self._real_whole(section, has_table=has_table)
        cut = self._tp_groups.cut_parameters[section]
        return cut[kind if kind in cut else "experts"]  # for which the tiny model's MLP stands

    def _real_whole(self, section: "Section", *, has_table: bool = True) -> int:
        memory, cut = self.whole_memory, sum(self._tp_groups.cut_parameters[section].values())
        if section == "head":
            total = memory.head_parameters(tied_on_same_rank=not has_table)
            return max(0, total - cut if has_table else total)
        if section == "embedding":
            return memory.embedding_parameters() - cut
        return self._tp_groups.layer_parameters[section] - cut


def _scale(
    buffer: "FlatBuffer",
    tensor: torch.Tensor,
    factors: "dict[CountedSection, float]",
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
