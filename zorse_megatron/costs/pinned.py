"""Size of pinned host blocks: torch's allocator rounds them up and caches them."""

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
    some (`adapter.optimizer.state_pieces`).

    >>> pinned_state_bytes(12 * 1000, 1000)
    12288
    """
    if not num_parameters:
        return 0
    block = _FLOAT32_BYTES * num_parameters
    return -(-num_bytes * pinned_bytes(block) // block)
