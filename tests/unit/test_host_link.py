"""Host memory of offloaded tensors: reused at once, by one at a time, within the limit."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zorse_megatron.runtime.host_link import HostLink, HostMemoryFull

SIZES = (64, 64, 96, 200)
LIMIT = 600
CPU = torch.device("cpu")


@given(turns=st.lists(st.tuples(st.booleans(), st.integers(0, 99)), max_size=60))
def test_blocks_hold_what_was_copied_within_the_limit(turns: list[tuple[bool, int]]) -> None:
    """A random order of offloads and returns, against plain copies of every tensor."""
    link = HostLink(CPU)
    link.limit_bytes = LIMIT
    away: list[tuple[torch.Tensor, torch.Tensor]] = []
    for number, (leaves, choice) in enumerate(turns):
        if leaves:
            num_bytes = SIZES[choice % len(SIZES)]
            value = torch.full((num_bytes,), number, dtype=torch.uint8)
            if sum(host.nbytes for host, _ in away) + num_bytes > LIMIT:
                with pytest.raises(HostMemoryFull):
                    link.new_host_bytes(num_bytes, "activations")
                continue
            host = link.new_host_bytes(num_bytes, "activations")
            link.start_to_host(value, host)
            away.append((host, value))
        elif away:
            host, value = away.pop(choice % len(away))
            link.give_back(host, "activations")
        assert all(host.equal(value) for host, value in away)
        assert link.host_bytes == sum(host.nbytes for host, _ in away)
        assert link.host_bytes <= link.allocated_bytes <= LIMIT


def test_equal_steps_allocate_once(monkeypatch: pytest.MonkeyPatch) -> None:
    allocated = counted(monkeypatch)
    link = HostLink(CPU)
    for _ in range(3):
        hosts = [link.new_host_bytes(num_bytes, "activations") for num_bytes in SIZES]
        for host in hosts:
            link.give_back(host, "activations")
    assert allocated == [*SIZES]


def test_free_blocks_make_room_for_other_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the machine has no more, they go back to it first."""
    allocated = counted(monkeypatch, machine_bytes=300)
    link = HostLink(CPU)
    link.give_back(link.new_host_bytes(200, "activations"), "activations")
    held = link.new_host_bytes(300, "activations")
    assert (allocated, held.nbytes, link.allocated_bytes) == ([200, 300], 300, 300)
    with pytest.raises(HostMemoryFull, match="no more host memory beyond 300 bytes"):
        link.new_host_bytes(1, "gradients")


def counted(monkeypatch: pytest.MonkeyPatch, machine_bytes: int = 10**9) -> list[int]:
    """What is allocated from now on, on a machine with so much memory."""
    allocated: list[int] = []
    alive: list[Any] = []
    empty = torch.empty

    def allocate(num_bytes: int, **options: Any) -> torch.Tensor:
        if not num_bytes:
            return empty(num_bytes, **options)
        in_use = sum(block.num_bytes for block in alive if block.is_alive())
        if in_use + num_bytes > machine_bytes:
            raise RuntimeError("CUDA error: out of memory")
        allocated.append(num_bytes)
        block = empty(num_bytes, **options)
        alive.append(Block(block))
        return block

    monkeypatch.setattr(torch, "empty", allocate)
    return allocated


class Block:
    """Whether its memory is still there."""

    def __init__(self, block: torch.Tensor) -> None:
        self.num_bytes = block.nbytes
        self._storage = torch.multiprocessing.reductions.StorageWeakRef(block.untyped_storage())

    def is_alive(self) -> bool:
        return not self._storage.expired()
