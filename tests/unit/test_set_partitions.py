"""Set partitions, counted by Bell's triangle."""

from itertools import accumulate

from zorse_megatron.planner.groupings.pools import set_partitions


def bell_numbers(count: int) -> list[int]:
    row, found = [1], []
    while len(found) < count:
        found.append(row[0])
        row = list(accumulate(row, initial=row[-1]))
    return found


def test_gives_each_partition_once():
    for size, bell in enumerate(bell_numbers(8)):
        items = tuple(range(size))
        found = list(set_partitions(items))
        assert len({frozenset(map(frozenset, each)) for each in found}) == len(found) == bell
        assert all(sorted(sum(each, ())) == list(items) for each in found)
