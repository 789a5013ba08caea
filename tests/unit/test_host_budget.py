"""Host memory: what a list sends there at most, what a machine has, and who may take how much."""

import dataclasses

import pytest

from zorse_megatron.runtime.host_budget import (
    HostMemoryError,
    HostMemoryNeed,
    available_host_bytes,
    check_host_memory,
    most_away,
)
from zorse_megatron.schedule.actions import parse_action

GIB = 2**30


def need(rank, node, available, **by_category):
    names = {"parameters": 0, "optimizer state": 0, "activations": 0}
    given = {name.replace("_", " "): count for name, count in by_category.items()}
    return HostMemoryNeed(
        rank=rank, node=node, by_category_bytes=names | given, available_bytes=available
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0F0 0F1 0B0 0B1", 0),  # each would come back beside what follows
        ("0F0 0F1 0F2 0B0 0B1 0B2", 0),  # or when the next one has been computed
        ("0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3", 30),
        ("0F0 0F1 0F2 0B2 0B1 0B0", 10),
        ("0F0 0B0 0F1 0B1", 0),  # each backward comes next
        ("0F0 0F1 1F0 1B0 1F1 1B1 0B0 0B1", 20),
        ("0F0 1F0 0F1 1F1 1B0 0B0 1B1 0B1", 20),
        ("0F0 1F0 0F1 1F1 0B0 1B0 0B1 1B1", 23),
        ("0REDUCE 0STEP", 0),
    ],
)
def test_most_away(text, expected):
    assert most_away([parse_action(word) for word in text.split()], {0: 10, 1: 3}) == expected


def test_spare_memory_is_shared_on_each_node():
    needs = [
        need(0, "a", 100, parameters=30),
        need(1, "a", 90, activations=20),
        need(2, "b", 50),
    ]
    assert check_host_memory(needs, limit_bytes=None) == {0: 50, 1: 40, 2: 50}
    assert check_host_memory(needs, limit_bytes=60) == {0: 35, 1: 25, 2: 50}


def test_what_ranks_have_in_the_host_already_was_not_seen_free():
    """Rank 0 has put 30 bytes there: of the node's 100 both ranks see 70."""
    there = dataclasses.replace(need(0, "a", 70, parameters=30), held_bytes=30)
    other = need(1, "a", 70, optimizer_state=60)
    assert check_host_memory([there, other], limit_bytes=None) == {0: 35, 1: 65}
    with pytest.raises(HostMemoryError, match="expected at most 100 bytes"):
        check_host_memory([there, need(1, "a", 70, optimizer_state=71)], limit_bytes=None)


def test_every_node_with_too_little_is_named():
    needs = [
        need(0, "a", 100, parameters=30, optimizer_state=61),
        need(1, "a", 100, activations=20),
        need(2, "b", 5, activations=6),
        need(3, "c", 100, activations=6),
    ]
    with pytest.raises(HostMemoryError) as caught:
        check_host_memory(needs, limit_bytes=None)
    first, second = caught.value.problems
    assert first.where == "node a"
    assert first.found.startswith("111 bytes")
    assert "rank 0: parameters 30, optimizer state 61; rank 1: activations 20" in first.found
    assert first.expected.startswith("at most 100 bytes")
    assert "11 bytes are missing and most of it is optimizer state" in first.remedy
    assert second.where == "node b"


@pytest.mark.parametrize(
    ("limit", "used", "expected"),
    [(None, None, 8 * GIB), ("max", 0, 8 * GIB), (4 * GIB, GIB, 3 * GIB), (2, 3, 0)],
)
def test_available(limit, used, expected, tmp_path):
    (tmp_path / "meminfo").write_text(
        f"MemTotal: {16 * 2**20} kB\nMemFree: 1 kB\nMemAvailable: {8 * 2**20} kB\n"
    )
    if limit is not None:
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        (tmp_path / "memory.current").write_text(f"{used}\n")
    assert available_host_bytes(tmp_path / "meminfo", tmp_path) == expected
