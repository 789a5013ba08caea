"""Which node keeps whose copy, against every other way to move one of them."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zorse_megatron.migration.mirror.partners import MirrorError, mirror_nodes, mirror_ranks

NODES = st.lists(st.sampled_from("abcd"), min_size=2, max_size=8).filter(lambda n: len(set(n)) > 1)


def fullness(
    nodes: list[str], keepers: tuple[str, ...], sizes: list[int], host: dict[str, int]
) -> dict[str, Fraction]:
    """How full each node is with own copies and those of others."""
    held = dict.fromkeys(nodes, 0)
    for node, keeper, size in zip(nodes, keepers, sizes, strict=True):
        held[node] += size
        held[keeper] += size
    return {name: Fraction(count, host[name]) for name, count in held.items()}


@given(NODES, st.data())
def test_another_node_keeps_it_and_no_move_of_one_copy_is_better(
    nodes: list[str], data: st.DataObject
) -> None:
    """Better: the fuller one of the two nodes is less full."""
    sizes = data.draw(st.lists(st.integers(0, 9), min_size=len(nodes), max_size=len(nodes)))
    host = {name: data.draw(st.integers(10, 60)) for name in sorted(set(nodes))}
    keepers = mirror_nodes(nodes, sizes, host)
    assert keepers == mirror_nodes(nodes, sizes, dict(reversed(host.items())))
    assert all(keeper != node for keeper, node in zip(keepers, nodes, strict=True))
    found = fullness(nodes, keepers, sizes, host)
    for rank, node in enumerate(nodes):
        for other in set(nodes) - {node}:
            both = keepers[rank], other
            moved = fullness(nodes, (*keepers[:rank], other, *keepers[rank + 1 :]), sizes, host)
            assert max(found[name] for name in both) <= max(moved[name] for name in both)


@given(st.integers(2, 6), st.integers(1, 4))
def test_equal_nodes_keep_as_much_as_they_send(count: int, ranks_each: int) -> None:
    nodes = [f"n{number}" for number in range(count) for _ in range(ranks_each)]
    keepers = mirror_nodes(nodes, [5] * len(nodes), dict.fromkeys(nodes, 100))
    assert {keepers.count(name) for name in nodes} == {ranks_each}


def test_a_node_with_more_memory_keeps_more() -> None:
    keepers = mirror_nodes(["a"] * 4 + ["b", "c"], [10] * 6, {"a": 100, "b": 300, "c": 100})
    assert keepers[:4].count("b") == 4


def test_one_node_is_refused() -> None:
    with pytest.raises(MirrorError, match="all ranks on node only"):
        mirror_nodes(["only", "only"], [1, 1], {"only": 10})


def test_ranks_of_a_node_take_equally_many_equal_copies() -> None:
    nodes = ["a"] * 4 + ["b"] * 2
    takers = mirror_ranks(nodes, [8] * 6, ["b"] * 4 + ["a"] * 2)
    assert takers == (4, 5, 4, 5, 0, 1)
