"""What a rank's process takes of GPU and host memory beside tensors.

Nothing here was measured by this project: each constant is a public report, or the source of NCCL,
torch or Transformer Engine, named beside it. docs/memory.md has the list.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from zorse_megatron.gpus.gpu import GpuKind
from zorse_megatron.plan.plan import Plan
from zorse_megatron.schedule.communicators import (
    WORLD_CTAS,
    Communicator,
    deadlock_note,
    max_ctas,
    most_ctas,
    planned_communicators,
)

_MIB = 2**20

CONTEXT_BYTES = 484 * _MIB
"""CUDA context, the kernels that lazy loading brings, and NCCL's own structures.

NVIDIA/nccl pull request 2366: a process with a communicator of one rank on an RTX 3090, CUDA 13.0.
Torch alone is at about 300 MiB since CUDA 11.7 (pytorch/pytorch issue 107667).
"""

# Torch's workspace of one cuBLAS handle and stream (`parseChosenWorkspaceSize`), and Transformer
# Engine's own (`get_cublas_workspace_size_bytes`); both are larger from Hopper on.
_HOPPER = (9, 0)
_TORCH_CUBLAS_BYTES, _TORCH_CUBLAS_HOPPER_BYTES = (2 * 4096 + 8 * 16) * 1024, 32 * _MIB
_TE_CUBLAS_BYTES, _TE_CUBLAS_HOPPER_BYTES = 4 * _MIB, 32 * _MIB + 256

RECEIVE_CHANNEL_BYTES = 10 * _MIB
"""Of one channel from one peer: the buffers of NCCL's three protocols.

NVIDIA/nccl issue 1685, which lists the allocations of all channels between eight GPUs.
"""
SEND_CHANNEL_BYTES = 2 * _MIB
"""Of one channel to one peer; the same list."""
_PAIR_BYTES = RECEIVE_CHANNEL_BYTES + SEND_CHANNEL_BYTES

_PEERS_ACROSS = 2
_TREE_PEERS = 3
"""That a rank has at most in a double binary tree, in both directions: the world's sums."""

_USUAL_MULTIPROCESSORS = 80


@dataclass(frozen=True, kw_only=True)
class MemoryItem:
    """One thing that is there whatever the tensors are."""

    name: str
    num_bytes: int


def process_items(gpu: GpuKind) -> tuple[MemoryItem, ...]:
    """Return the context and the workspaces of a process on a kind of GPU."""
    is_hopper = gpu.capability is not None and gpu.capability >= _HOPPER
    torch_bytes = _TORCH_CUBLAS_HOPPER_BYTES if is_hopper else _TORCH_CUBLAS_BYTES
    te_bytes = _TE_CUBLAS_HOPPER_BYTES if is_hopper else _TE_CUBLAS_BYTES
    context = CONTEXT_BYTES if gpu.context_bytes is None else gpu.context_bytes
    return (
        MemoryItem(name="CUDA context", num_bytes=context),
        MemoryItem(name="cuBLAS workspaces", num_bytes=torch_bytes + te_bytes),
    )


def communicator_bytes(communicator: Communicator, rank: int, channels: int) -> int:
    """Return what a communicator with so many channels takes on one of its ranks.

    A link moves one way. A group reduces and gathers in a ring, with one peer before and one after;
    the world's sums may take a tree. Across regions a rank sends to two others, and receives from
    two, where shards are about equal. Between nodes the buffers may be in the host instead.
    """
    if communicator.use == "link":
        receives = communicator.ranks[1] == rank
        return channels * (RECEIVE_CHANNEL_BYTES if receives else SEND_CHANNEL_BYTES)
    most_peers = {"world": _TREE_PEERS, "across": _PEERS_ACROSS}.get(communicator.use, 1)
    return channels * min(most_peers, len(communicator.ranks) - 1) * _PAIR_BYTES


def most_bytes(gpu: GpuKind) -> int:
    """Return what a process takes at most, before a plan says which communicators it has.

    Their channels together are a part of the GPU's processors, unless there are more communicators.
    """
    channels = most_ctas(_multiprocessors(gpu))
    communicators = channels * _PAIR_BYTES + WORLD_CTAS * _TREE_PEERS * _PAIR_BYTES
    return sum(item.num_bytes for item in process_items(gpu)) + communicators


def fixed_items(plan: Plan, gpus: Sequence[GpuKind]) -> tuple[tuple[MemoryItem, ...], ...]:
    """Rank -> its items under a plan. `gpus`: of each rank."""
    channels = planned_channels(plan, [_multiprocessors(gpu) for gpu in gpus])
    of_rank: list[dict[str, int]] = [{} for _ in gpus]
    counts: list[Counter[str]] = [Counter() for _ in gpus]
    for communicator, number in channels.items():
        for rank in communicator.ranks:
            use, found = communicator.use, of_rank[rank]
            found[use] = found.get(use, 0) + communicator_bytes(communicator, rank, number)
            counts[rank][use] += 1
    own = {gpu.name: process_items(gpu) for gpu in gpus}
    return tuple(
        (
            *own[gpu.name],
            *(
                MemoryItem(name=f"NCCL: {counts[rank][use]} x {use}", num_bytes=size)
                for use, size in of_rank[rank].items()
            ),
        )
        for rank, gpu in enumerate(gpus)
    )


def fixed_bytes(plan: Plan, gpus: Sequence[GpuKind]) -> tuple[int, ...]:
    """Rank -> the sum of its items."""
    return tuple(sum(item.num_bytes for item in items) for items in fixed_items(plan, gpus))


def deadlock_risk(plan: Plan, gpus: Sequence[GpuKind]) -> str | None:
    """See `deadlock_note`. `gpus`: of each rank."""
    return deadlock_note(plan, [_multiprocessors(gpu) for gpu in gpus])


def planned_channels(plan: Plan, num_sms: Sequence[int]) -> Mapping[Communicator, int]:
    """Communicator -> its channels, as the runtime asks NCCL for."""
    communicators = planned_communicators(plan)
    return max_ctas(communicators, num_sms) if communicators else {}


def _multiprocessors(gpu: GpuKind) -> int:
    return gpu.multiprocessors or _USUAL_MULTIPROCESSORS


# Size of pinned host blocks: torch's allocator rounds them up and caches them.


_FLOAT32_BYTES = 4


def pinned_bytes(num_bytes: int) -> int:
    """Bytes of the host that one block takes: the next power of two.

    Source: torch 2.13, `CachingHostAllocatorImpl::allocate` (c10 `PowerOf2Ceil`), which rounds
    blocks of any size unless `PYTORCH_ALLOC_CONF` has a `pinned_max_round_threshold_mb`.

    >>> pinned_bytes(4096), pinned_bytes(4097), pinned_bytes(0)
    (4096, 8192, 0)
    """
    return 1 << (num_bytes - 1).bit_length() if num_bytes > 0 else 0


def pinned_state_bytes(num_bytes: int, num_parameters: int) -> int:
    """Bytes that the optimizer's state of one chunk's shard takes: a block for each kind of it.

    `num_bytes` is that of the state, in float32: two moments, and main parameters where there are
    some (`adapter.optimizer.host_state`).

    >>> pinned_state_bytes(12 * 1000, 1000)
    12288
    """
    if not num_parameters:
        return 0
    block = _FLOAT32_BYTES * num_parameters
    return -(-num_bytes * pinned_bytes(block) // block)
