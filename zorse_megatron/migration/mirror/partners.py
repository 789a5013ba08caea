"""Which node keeps the copy of a rank's state: another one than its own, as full as the others.

A node keeps the own copies of its ranks as well, as they are what survivors start from.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from zorse_megatron.errors import Problem, ZorseError


class MirrorError(ZorseError):
    """State cannot be mirrored."""


def mirror_nodes(
    nodes: Sequence[str], state_bytes: Sequence[int], host_bytes: Mapping[str, int]
) -> tuple[str, ...]:
    """Return the node that keeps each rank's copy.

    `nodes`: of each rank; `state_bytes`: of its copy; `host_bytes`: what each node can give. Every
    copy goes to the node that is least full with it, the largest ones first. Then copies are moved
    one by one, as long as the fuller one of two nodes gets less full by it. Raises MirrorError if
    all ranks are on one node.
    """
    names = sorted(set(nodes))
    if len(names) < 2:
        raise MirrorError(
            "State cannot be mirrored",
            [
                Problem(
                    where="--zorse-mirror",
                    found=f"all ranks on node {', '.join(names)}",
                    expected="two nodes or more, so that one can keep what another loses",
                    remedy="Leave the flag out, and save checkpoints.",
                )
            ],
        )
    load = dict.fromkeys(names, 0)
    for node, count in zip(nodes, state_bytes, strict=True):
        load[node] += count
    keepers = list(nodes)
    largest_first = sorted(range(len(nodes)), key=lambda rank: (-state_bytes[rank], rank))
    for rank in largest_first:
        count = state_bytes[rank]
        others = (name for name in names if name != nodes[rank])
        keepers[rank] = min(others, key=lambda name: (load[name] + count) / host_bytes[name])
        load[keepers[rank]] += count
    copies = _Copies(keepers=keepers, load=load, host_bytes=host_bytes)
    while any(copies.improve(rank, nodes[rank], state_bytes[rank]) for rank in largest_first):
        pass
    return tuple(keepers)


def mirror_ranks(
    nodes: Sequence[str], state_bytes: Sequence[int], keepers: Sequence[str]
) -> tuple[int, ...]:
    """Return the rank that takes each rank's copy, on the node that keeps it.

    Of the node's ranks, the one that has got least so far, the largest copies first.
    """
    got = [0] * len(nodes)
    takers = [0] * len(nodes)
    for rank in sorted(range(len(nodes)), key=lambda rank: (-state_bytes[rank], rank)):
        there = (each for each, node in enumerate(nodes) if node == keepers[rank])
        takers[rank] = min(there, key=lambda each: (got[each], each))
        got[takers[rank]] += state_bytes[rank]
    return tuple(takers)


@dataclass(frozen=True, kw_only=True)
class _Copies:
    """Where copies are, to be changed in place."""

    keepers: list[str]
    load: dict[str, int]
    """Bytes on each node."""
    host_bytes: Mapping[str, int]

    def improve(self, rank: int, own: str, count: int) -> bool:
        """Move a rank's copy if the fuller one of the two nodes is less full then.

        Each move lowers the list of how full nodes are, fullest first, so moves come to an end.
        """
        now = self.keepers[rank]
        for name, before in self.load.items():
            # Whole numbers: rounded ones could go round in circles.
            less_full = (before + count) * self.host_bytes[now] < self.load[now] * self.host_bytes[
                name
            ]
            if less_full and name not in (own, now):
                self.load[now] -= count
                self.load[name] = before + count
                self.keepers[rank] = name
                return True
        return False
