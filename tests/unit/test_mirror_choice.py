"""Which iteration the copies on the nodes that are left are good for, against all deaths."""

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from zorse_megatron.migration.mirror.choice import Copy, newest_whole, what_is_missing
from zorse_megatron.migration.mirror.partners import mirror_nodes


def copy(rank: int, node: str, iteration: int = 4, start: str = "s", world_size: int = 2) -> Copy:
    return Copy(iteration=iteration, world_size=world_size, start=start, rank=rank, node=node)


@given(st.lists(st.sampled_from("abc"), min_size=2, max_size=6).filter(lambda n: len(set(n)) > 1))
def test_one_node_may_die_and_two_if_neither_keeps_the_others(nodes: list[str]) -> None:
    keepers = mirror_nodes(nodes, [1] * len(nodes), dict.fromkeys(nodes, 9))
    copies = [
        copy(rank, where, world_size=len(nodes))
        for rank, both in enumerate(zip(nodes, keepers, strict=True))
        for where in both
    ]
    for count in (1, 2):
        for dead in combinations(sorted(set(nodes)), count):
            left = [each for each in copies if each.node not in dead]
            lost = [r for r in range(len(nodes)) if {nodes[r], keepers[r]} <= set(dead)]
            found = newest_whole(left)
            assert (found is None) == bool(lost)
            if found is not None:
                assert len(found.nodes) == len(nodes)
                assert all(
                    node in {nodes[rank], keepers[rank]} - set(dead)
                    for rank, node in enumerate(found.nodes)
                )


def test_an_older_whole_one_comes_before_a_newer_torn_one() -> None:
    copies = [copy(0, "a"), copy(1, "a"), copy(0, "a", 5)]
    found = newest_whole(copies)
    assert found is not None and found.iteration == 4
    assert what_is_missing(copies) == "of iteration 5 the copy of rank 1 (of 2) is lost"


def test_copies_of_two_starts_are_not_mixed() -> None:
    copies = [copy(0, "a", start="first"), copy(1, "b", start="second")]
    assert newest_whole(copies) is None
    assert what_is_missing([]) == "there is no copy of any rank on these nodes"


def test_reads_are_shared_by_nodes_that_have_the_same_copies() -> None:
    found = newest_whole([copy(rank, node) for rank in (0, 1) for node in "ba"])
    assert found is not None and found.nodes == ("a", "b")
