"""The emulated GPU's memory: counts the real model's bytes, and raises what CUDA would raise.

Counted are parameters, gradients and optimizer state, what each layer keeps from its forward to its
backward, and the head's logits, by the planner's memory model. What runs on this machine is the
tiny model; its own bytes do not matter. Messages under way and fragmentation are not counted: the
planner's margin, which is taken off the capacity, is for those.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from zorse_megatron.costs.interface import MemoryCost, RecomputeMode
from zorse_megatron.costs.stage_formulas import frozen_bytes
from zorse_megatron.emulate.on_ranks.host_copies import EmulatedHostLink

if TYPE_CHECKING:
    from zorse_megatron.adapter.model.chunk_view import ChunkView
    from zorse_megatron.emulate.on_ranks.model_sizes import ModelSizes


_MOMENTS_BYTES = 8
"""Adam's two, in float32."""


class MemoryCap:
    """What one emulated GPU holds."""

    def __init__(
        self,
        sizes: "ModelSizes",
        *,
        capacity_bytes: int,
        rank: int,
        kind: str | None = None,
    ) -> None:
        """`capacity_bytes`: what it may hold; `kind`: of GPU."""
        self.kind = kind
        self.memory = sizes.memory
        self.sizes = sizes
        self.capacity_bytes = capacity_bytes
        self.rank = rank
        self.saved_bytes = 0
        """Activations and logits."""
        self.peak_bytes = 0
        self.chunks: Sequence[ChunkView] = ()
        self.host: EmulatedHostLink | None = None
        """What waits in the host, if anything may."""
        self.overflow: str | None = None
        """What was said when it did not suffice."""
        self._leaving_bytes = 0

    def state_bytes(self) -> int:
        """Parameters, gradients and optimizer state, sharded or not as they are now."""
        return sum(map(self._chunk_bytes, self.chunks))

    def check(self) -> None:
        """Between passes. Raises torch.OutOfMemoryError if more is held than there is."""
        self._leave()
        self.look()

    def look(self) -> None:
        """Within a pass, or where there are none. Raises as `check` does."""
        away_bytes = self.host.activation_bytes if self.host is not None else 0
        total = self.state_bytes() + self.saved_bytes - away_bytes
        self.peak_bytes = max(self.peak_bytes, total)
        self._refuse_beyond(total)

    def check_start(self) -> None:
        """The same before the first step, which is no peak of it.

        Resident parameters and gradients are unsharded, of others there are shards. The first step
        makes Adam's moments, unless they wait in the host.
        """
        made_in_step = [chunk for chunk in self.chunks if not self._has_state_in_host(chunk)]
        owned = sum(map(self.sizes.owned_parameters, made_in_step))
        self._refuse_beyond(self.state_bytes() - _MOMENTS_BYTES * owned)

    def _has_state_in_host(self, chunk: "ChunkView") -> bool:
        return self.host is not None and self.host.state_on_gpu_bytes(chunk) is not None

    def _refuse_beyond(self, total: int) -> None:
        if total <= self.capacity_bytes:
            return
        self.overflow = (
            f"CUDA out of memory. The emulated GPU of rank {self.rank} would hold "
            f"{total / 2**30:.2f} GiB (activations {self.saved_bytes / 2**30:.2f} GiB, parameters, "
            f"gradients and optimizer state {(total - self.saved_bytes) / 2**30:.2f} GiB); it has "
            f"{self.capacity_bytes / 2**30:.2f} GiB for tensors."
        )
        raise torch.OutOfMemoryError(self.overflow)

    def keep(self, num_bytes: int) -> None:
        """Hold activations. Raises torch.OutOfMemoryError."""
        self._leave()
        self.saved_bytes += num_bytes
        self.look()

    def drop(self, num_bytes: int) -> None:
        """Let activations go with the next change: until then their backward runs.

        Raises torch.OutOfMemoryError, as there are gradients now.
        """
        self._leave()
        self.look()
        self._leaving_bytes = num_bytes

    def keep_layer(self, memory: MemoryCost, size: int, how: RecomputeMode) -> int:
        """Hold what a layer's forward keeps of `size` samples, and return it.

        `memory`: of the layer. Raises torch.OutOfMemoryError.
        """
        num_bytes = memory.activation_bytes(size, how, self.kind)
        self.keep(num_bytes)
        return num_bytes

    def drop_layer(self, memory: MemoryCost, size: int, how: RecomputeMode) -> None:
        """Let it go with the next change, after having all of it there if it is recomputed."""
        whole, kept = (memory.activation_bytes(size, mode, self.kind) for mode in ("none", how))
        self.keep(whole - kept)
        self.drop(whole)

    def _leave(self) -> None:
        self.saved_bytes -= self._leaving_bytes
        self._leaving_bytes = 0

    def _chunk_bytes(self, chunk: "ChunkView") -> int:
        memory = self.memory
        unsharded = sum(self.sizes.real_parameters(chunk).values())
        owned = self.sizes.owned_parameters(chunk)
        have_parameters = all(_is_there(buffer.parameters) for buffer in chunk.buffers)
        have_gradients = all(_is_there(buffer.gradients) for buffer in chunk.buffers)
        own_bytes, state_bytes = memory.parameter_bytes(owned), memory.state_bytes(owned)
        # Where replicas cut layers differently, what a rank owns is beside what it computes with.
        beside_bytes = own_bytes if have_parameters and _is_packed(chunk) else 0
        if self.host is not None:
            own_bytes = 0 if self.host.has_parameters(chunk) else own_bytes
            passing_bytes = self.host.state_on_gpu_bytes(chunk)
            state_bytes = state_bytes if passing_bytes is None else passing_bytes
        gradients = unsharded if have_gradients else owned * _has_gradient_shards(chunk)
        if have_gradients and _is_packed(chunk):  # sums arrive beside what they are made of
            gradients += owned * _has_gradient_shards(chunk)
        return (
            _frozen_bytes(memory, chunk)
            + beside_bytes
            + (memory.parameter_bytes(unsharded) if have_parameters else own_bytes)
            + memory.gradient_bytes(gradients)
            + state_bytes
        )


def _frozen_bytes(memory: MemoryCost, chunk: "ChunkView") -> int:
    """What is not trained, and stays where it is."""
    ends = chunk.embedding is not None, chunk.output_layer is not None
    has_table = chunk.has_own_output_table
    return int(
        frozen_bytes(
            memory, len(chunk.layers), *ends, tied_on_same_rank=all(ends) and not has_table
        )
    )


def _is_packed(chunk: "ChunkView") -> bool:
    """Whether what the rank owns is packed (`adapter.data_parallel.mixed_tp_shards`)."""
    return bool(getattr(chunk.wrapped, "mixed_tp", None))


def _has_gradient_shards(chunk: "ChunkView") -> bool:
    """Whether sums of gradients have arrived, of a chunk whose gradients come and go."""
    shards = chunk.wrapped.shards
    if _is_packed(chunk):
        return bool(shards.sums)
    return any(
        buffer.in_shard and not (buffer.memory is not None and buffer.memory.is_away)
        for buffer in shards.gradients
    )


def _is_there(tensor: torch.Tensor | None) -> bool:
    """Whether a flat buffer has its memory; without one the parameters have storages of theirs."""
    return tensor is None or tensor.untyped_storage().nbytes() > 0
