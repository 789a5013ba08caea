"""The link of an emulated GPU to its host: copies with times, and what is offloaded meanwhile.

Each direction of a GPU's link to the host is a stream of its own, as in `runtime.host_link`: a
copy starts after what the rank has computed so far and after the copy before it, and takes what
the cost models say for the real model's bytes. No other GPU takes part, so the conductor need not
know. The tiny model's state is cut into as many pieces as the real one's.
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import torch

from zorse_megatron.emulate.conductor import RankClock
from zorse_megatron.runtime.host_link import HostBacked, HostLink
from zorse_megatron.runtime.sharded_buffer import ShardedBuffer
from zorse_megatron.schedule.shards import state_pieces

if TYPE_CHECKING:
    from zorse_megatron.adapter.model.chunk_view import ChunkView
    from zorse_megatron.adapter.optimizer.host_state import HostState, OwnedShard
    from zorse_megatron.emulate.on_ranks.model_sizes import ModelSizes


@dataclass(frozen=True, kw_only=True)
class HostCopy:
    """A copy under way; stands in for the CUDA event after it."""

    end_s: float


class EmulatedHostLink(HostLink):
    """Copies at once, and lets the rank's clock say when that would be done on the emulated GPU."""

    def __init__(
        self,
        clock: RankClock,
        sizes: "ModelSizes",
        chunks: "Sequence[ChunkView]",
        *,
        bytes_per_s: float,
    ) -> None:
        """`chunks`: the rank's, as far as they are known."""
        super().__init__(torch.device("cpu"))
        self.clock = clock
        self.sizes = sizes
        self.chunks = chunks
        self.bytes_per_s = bytes_per_s
        self.forward_bytes = 0
        """What the layers of the last forward keep in the real model."""
        self.step_elements: int | None = None
        """What the tiny model's whole step changes; None where it is not made in pieces."""
        self._free_s = {True: 0.0, False: 0.0}
        """To the host? -> when the stream has nothing to do."""
        self._known: dict[int, tuple[weakref.ref[HostBacked], int]] = {}
        """By storage: whose it is, and its bytes in the real model."""
        self._activations: weakref.WeakSet[HostBacked] = weakref.WeakSet()
        self._state: dict[int, list[HostBacked]] = {}
        """By chunk: all pieces of its optimizer state."""

    # Time.

    def start_to_host(self, source: torch.Tensor, host: torch.Tensor) -> HostCopy | None:
        super().start_to_host(source, host)
        return self._start(source, to_host=True)

    def start_from_host(self, host: torch.Tensor, target: torch.Tensor) -> HostCopy | None:
        super().start_from_host(host, target)
        return self._start(target, to_host=False)

    def _start(self, tensor: torch.Tensor, *, to_host: bool) -> HostCopy | None:
        """Start to copy what is, or will be, in `tensor` on the GPU; None: it takes no time."""
        if not self.clock.is_running:
            return None
        start_s = max(self.clock.now_s, self._free_s[to_host])
        end_s = start_s + self.real_bytes(tensor) / self.bytes_per_s
        self._free_s[to_host] = end_s
        return HostCopy(end_s=end_s)

    def hold_back(self, copied: HostCopy) -> None:
        """Let the rank's clock wait where a CUDA stream would."""
        self.clock.until(copied.end_s)

    # Sizes.

    def real_bytes(self, tensor: torch.Tensor) -> int:
        """The real model's size of a storage that may be offloaded."""
        storage = tensor.untyped_storage()._cdata
        owner, num_bytes = self._known.get(storage, (None, 0))
        if owner is not None and owner() is not None:
            return num_bytes
        for chunk in self.chunks:
            for of_gradients in (False, True):
                for buffer in _sharded_buffers(chunk, of_gradients=of_gradients):
                    if buffer.memory is not None and buffer.memory.storage._cdata == storage:
                        owned = self.sizes.owned_parameters(chunk)
                        elements = sum(each.num_owned for each in _sharded_buffers(chunk))
                        count = owned * buffer.num_owned // max(1, elements)
                        memory = self.sizes.memory
                        return (
                            memory.gradient_bytes(count)
                            if of_gradients
                            else memory.parameter_bytes(count)
                        )
        return tensor.nbytes

    def expect_activations(self, memories: Sequence[HostBacked]) -> None:
        """What a tiny forward kept stands for what the real one keeps."""
        tiny = [memory.num_bytes for memory in memories]
        for memory, share in zip(memories, _scaled(tiny, self.forward_bytes), strict=True):
            self._note(memory, share)
            self._activations.add(memory)

    def expect_state(self, state: "HostState") -> None:
        """Pieces of the tiny state stand for pieces of the real one."""
        self.step_elements = state.num_elements
        for of_chunk in state.states:
            chunk = self._chunk_of(of_chunk.shards)
            if chunk is None:
                continue  # the rank owns nothing of the chunk
            counts = _scaled(
                [piece.num_elements for piece in of_chunk.pieces],
                self.sizes.owned_parameters(chunk),
            )
            for piece, count in zip(of_chunk.pieces, counts, strict=True):
                num_bytes = self.sizes.memory.state_bytes(count)
                tiny = [memory.num_bytes for memory in piece.memories]
                for memory, share in zip(piece.memories, _scaled(tiny, num_bytes), strict=True):
                    self._note(memory, share)
            self._state[id(chunk)] = [m for piece in of_chunk.pieces for m in piece.memories]

    def piece_sizes(self, shards: "Sequence[OwnedShard]") -> list[int]:
        """Elements of the tiny model's pieces: as many pieces as the real model's."""
        chunk, tiny = self._chunk_of(shards), sum(shard.tensor.numel() for shard in shards)
        real = state_pieces(0 if chunk is None else self.sizes.owned_parameters(chunk))
        return _scaled(real, tiny)

    # Memory.

    @property
    def activation_bytes(self) -> int:
        """Activations that are in the host and not on the GPU."""
        return sum(self._known[m.storage._cdata][1] for m in self._activations if m.is_away)

    def has_parameters(self, chunk: "ChunkView") -> bool:
        """Whether the chunk's shard of parameters is in the host."""
        return any(
            buffer.in_shard and buffer.memory is not None and buffer.memory.is_away
            for buffer in _sharded_buffers(chunk)
        )

    def state_on_gpu_bytes(self, chunk: "ChunkView") -> int | None:
        """Optimizer state of the chunk that is on the GPU; None if all of it always is."""
        memories = self._state.get(id(chunk))
        if memories is None:
            return None
        return sum(self._known[m.storage._cdata][1] for m in memories if not m.is_away)

    def _note(self, memory: HostBacked, num_bytes: int) -> None:
        self._known[memory.storage._cdata] = weakref.ref(memory), num_bytes

    def _chunk_of(self, shards: "Sequence[OwnedShard]") -> "ChunkView | None":
        for chunk in self.chunks:
            mine = {id(parameter) for parameter in chunk.model.parameters()}
            if shards and id(shards[0].parameter) in mine:
                return chunk
        return None


def _sharded_buffers(chunk: "ChunkView", *, of_gradients: bool = False) -> Sequence[ShardedBuffer]:
    """The buffers of a chunk whose parameters come and go; none for other chunks."""
    shards = getattr(chunk.wrapped, "shards", None)
    if shards is None:
        return ()
    return tuple(shards.gradients if of_gradients else shards.parameters)


def _scaled(counts: Sequence[int], total: int) -> list[int]:
    """Deal `total` out in the proportion of the counts.

    >>> _scaled([16, 16, 2], 17)
    [8, 8, 1]
    """
    whole = max(1, sum(counts))
    bounds = [total * upto // whole for upto in accumulate(counts, initial=0)]
    return [stop - start for start, stop in pairwise(bounds)]
