"""Bytes that tensors of an emulated job represent, those between ranks of a TP group among them."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from zorse_megatron.costs.interface import ModelSection
from zorse_megatron.emulate.emulated_job import EmulatedJob, JobTpGroups
from zorse_megatron.emulate.tiny_model import LORA_RANK
from zorse_megatron.runtime.mixed_tp_exchange import Exchanged

if TYPE_CHECKING:
    from zorse_megatron.adapter.model.chunk_view import ChunkView
    from zorse_megatron.runtime.mixed_tp_exchange import MixedTpTensor
    from zorse_megatron.schedule.tensor_parallel_parts import UnitKind


class TensorSizes:
    """How many bytes a tensor stands for in the emulated job; here for itself."""

    def message_bytes(self, tensor: torch.Tensor) -> int:
        """Size of a tensor that is sent from rank to rank."""
        return tensor.nbytes

    def buffer_bytes(self, tensor: torch.Tensor) -> int:
        """Size of a tensor that a collective works on."""
        return tensor.nbytes

    def part_bytes(self, parts: Sequence[torch.Tensor]) -> list[int]:
        """Size of each rank's part of a tensor that a collective works on."""
        return [part.nbytes for part in parts]

    def on_operation(self) -> None:
        """Told that gradients are about to be summed, or parameters gathered."""

    def is_tp_group(self, ranks: Sequence[int]) -> bool:
        """Whether these ranks are this rank's tensor-parallel group, of several."""
        return False

    def inside_bytes(self, tensor: torch.Tensor) -> int | None:
        """Size of a tensor that a collective of the TP group works on; None: it takes no time."""
        return tensor.nbytes

    def activation_bytes(self, num_elements: int) -> int:
        """Size of an activation of so many elements."""
        raise AssertionError("without TP groups nothing asks for this")

    def exchange_bytes(self, exchanged: Exchanged) -> dict[tuple[int, int], int]:
        """(source, target) -> size of what one sends the other in an exchange of parts."""
        sizes: dict[tuple[int, int], int] = {}
        for tensor in exchanged.unit:
            for pair, count in exchanged.messages(tensor).items():
                sizes[pair] = sizes.get(pair, 0) + 4 * count
        return sizes


# Sizes of what tensor-parallel groups communicate in the real model, from one rank's tiny tensors.
#
# An activation counts by its number of elements; what the loss sums, and samples that are
# broadcast, by the number of tokens; gradients that are summed over the TP group because all its
# ranks have the whole parameter, and what replicas that differ in TP shards exchange, by how many
# parameters are cut in one way.


class TpSizes:
    """Of one rank."""

    def __init__(self, job: EmulatedJob, tp_groups: JobTpGroups, rank: int) -> None:
        """`tp_groups`: of the job."""
        self.memory = tp_groups.memories[rank]
        """Of a rank which is a TP group of its own."""
        self.tp_groups = tp_groups
        self.ranks = tp_groups.ranks[rank]
        self.measured = tp_groups.measured[rank]
        self.computed: ModelSection | None = None
        """Which section of the model this rank computes."""
        self.on_exchange: Callable[[], None] = lambda: None
        """Called when one begins."""
        self._tiny = job.sequence_length, job.hidden_size
        self._adapter_factor = tp_groups.adapter_share * job.hidden_size / LORA_RANK
        """Real A x beside the tiny one, each as a share of an activation."""
        self._num_whole = 0
        """Of one layer of the tiny model: parameters that TP groups do not cut."""
        self._factors: dict[MixedTpTensor, float] = {}
        """Real elements for each of the tiny tensor's."""
        self._owned: dict[int, int] = {}
        """By chunk: real parameters that this rank owns."""
        self._chunks: list[ChunkView] = []

    @property
    def degree(self) -> int:
        """Ranks of the TP group."""
        return len(self.ranks)

    def inside_bytes(self, tensor: torch.Tensor) -> int | None:
        """Of a tensor that the TP group sums, gathers or broadcasts; None: that was measured."""
        if tensor.dim() == 3:  # [positions, samples, hidden], or A x of adapters
            count = tensor.numel()
            if tensor.shape[2] % self._tiny[1]:
                count = round(count * self._adapter_factor)
            return None if self.computed in self.measured else self.activation_bytes(count)
        if tensor.dim() == 2:  # a number for each token
            if tensor.is_floating_point() and self.computed in self.measured:
                return None
            return tensor.nbytes * self.tp_groups.sequence_length // self._tiny[0]
        if tensor.numel() > 1 and tensor.is_floating_point():
            factor = self._real_whole("layer", 1) / max(1, self._num_whole)
            return self.memory.gradient_bytes(round(tensor.numel() * factor))
        return tensor.nbytes

    def activation_bytes(self, num_elements: int) -> int:
        """Of an activation of so many elements."""
        length, hidden = self._tiny
        return self.memory.boundary_bytes(1) * num_elements // (length * hidden)

    def add(self, chunk: "ChunkView") -> None:
        """Learn a chunk."""
        self._num_whole = chunk.num_whole or self._num_whole
        self._chunks.append(chunk)

    def owned_parameters(self, chunk: "ChunkView") -> int | None:
        """Real parameters that this rank owns of a chunk; None where replicas are alike."""
        if not getattr(chunk.wrapped, "mixed_tp", None):
            return None
        if id(chunk) not in self._owned:
            self._learn(chunk)
        return self._owned[id(chunk)]

    def exchange_bytes(self, exchanged: "Exchanged") -> dict[tuple[int, int], int]:
        """(source, target) -> what one sends the other."""
        for chunk in self._chunks:
            self.owned_parameters(chunk)
        self.on_exchange()
        elements: dict[tuple[int, int], float] = {}
        for tensor in exchanged.unit:
            for pair, count in exchanged.messages(tensor).items():
                elements[pair] = elements.get(pair, 0.0) + count * self._factors[tensor]
        to_bytes = self.memory.gradient_bytes if exchanged.sums else self.memory.parameter_bytes
        return {pair: to_bytes(round(count)) for pair, count in elements.items()}

    def _learn(self, chunk: "ChunkView") -> None:
        from zorse_megatron.adapter.model.chunk_view import mixed_tp_parameters

        found = list(mixed_tp_parameters(chunk))
        tiny: dict[tuple[ModelSection, UnitKind | None], int] = {}
        for each in found:
            count = torch.Size(each.tensor.part.shape).numel()
            tiny[each.section, each.kind] = tiny.get((each.section, each.kind), 0) + count
        owned = 0.0
        for each in found:
            real = self._real(each.section, each.kind, chunk)
            self._factors[each.tensor] = real / tiny[each.section, each.kind]
            owned += each.num_owned * self._factors[each.tensor]
        self._owned[id(chunk)] = round(owned)

    def _real(self, section: ModelSection, kind: "UnitKind | None", chunk: "ChunkView") -> int:
        """Parameters of the real chunk that are cut in this way."""
        layers = len(chunk.layers) if section == "layer" else 1
        if kind is not None:
            return layers * self._cut(section)[kind]
        return self._real_whole(section, layers, has_table=chunk.has_own_output_table)

    def _real_whole(self, section: ModelSection, layers: int, *, has_table: bool = True) -> int:
        memory = self.memory
        if section == "head":
            total = memory.head_parameters(tied_on_same_rank=not has_table)
            cut = sum(self._cut(section).values()) if has_table else 0
            return max(0, total - cut)
        total = memory.layer_parameters() if section == "layer" else memory.embedding_parameters()
        return layers * (total - sum(self._cut(section).values()))

    def _cut(self, section: ModelSection) -> "Mapping[UnitKind, int]":
        return self.tp_groups.cut_parameters[section]
