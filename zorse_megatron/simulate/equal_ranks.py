"""Ranks that must behave identically, so that one can be simulated for all.

Copies. Let the replicas of a group that run equally many micro-batches be a class, whose R replicas
all have micro-batches of m samples; let r be the
greatest common divisor of the R * m and the extra samples in flight of all groups, and L the least
common multiple of the m. Samples are laid out in
rounds of R * m of one class or another, by counts alone (see `schedule.samples`; where two classes
may be at the same point, all replicas of one precede those of the other). If L divides r, cut every
r consecutive
samples into g = r / L blocks of L. No micro-batch straddles a block, so the k-th blocks of all
rounds are a pipeline of their own, the k-th of g, with R / g replicas of each class. The lists of
each copy are those of the plan with R / g replicas of each and 1 / g of the batch, other names for
ranks and samples aside, if in each copy replicas of the classes follow one another in the same
order. The simulation in `schedule.micro_batch_order` breaks ties by chunk and replica, which both
keep, and it compares samples of one replica by windows, whose size r divides, so that two
micro-batches share a window in both or in neither; it must not get stuck, where it lets one of all
replicas go on (which is checked). In that of `schedule.pipeline_schedules` replicas of a group wait
for each other; all copies are there at the same time, so each could be alone.

Classes. Copies are of one class if their ranks have the same kinds, shards, fixed memory and
settings (what they recompute and offload) and their transfers the same costs, and cross links that
are alike (see `equal_ranks`). All copies of a class run at the same times, by induction over time:
their computations and copies to the host cost the same, their
collectives are the same ones, and their flows have the same rates, because progressive filling
decides by the bandwidth of links and by how many flows of each sort cross them, so that at each
step it stops all flows of a sort or none. So it is enough to simulate one copy of each class, with
each of its flows counted as often on a link as copies of it cross that link.

Beyond 256 ranks two things do not tell copies apart: a ring crosses the links of the last GPU of a
node and of the first of the next one, but not of those between; and one copy waits for the loss.
Then fewer are simulated, as few as a twelfth, and iterations differ from those of all ranks by less
than 0.2 %, as far as was measured.

The swaps of a tied embedding run between copies, so a plan with one is not merged; nor is one with
replicas in several regions, whose samples are laid out otherwise.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations

from zorse_megatron.costs.interface import CommCost
from zorse_megatron.costs.topology import numbered
from zorse_megatron.plan.memory_settings import (
    ranks_that_offload,
)
from zorse_megatron.plan.plan import Group, Plan
from zorse_megatron.schedule.actions import SENDS, TRANSFERS, Action, ActionLists
from zorse_megatron.schedule.lower import lower_unless_stuck
from zorse_megatron.schedule.samples import Lanes
from zorse_megatron.simulate.network import EqualLinks
from zorse_megatron.simulate.rank_bytes import RankSizes

# Which copies of a pipeline run at the same times (see `equal_ranks`).
#
# Colour refinement (one-dimensional Weisfeiler-Leman) on copies and links: copies that look the
# same are of one class; links are alike if they have the same bandwidth and are crossed by equally
# many copies of each transfer in each class; copies of a class that cross links that are not alike
# are told apart. Repeated until nothing changes. O(rounds x transfers x links on a way).


Edge = tuple[int, int]
"""(source, target), as global ranks."""
MOST_TOLD_APART = 256
"""Ranks up to which copies are told apart by rings and by who waits for the loss: see the top."""


def classify_copies(
    comm: CommCost,
    copies: Sequence[Mapping[int, int]],
    edges: Sequence[Edge],
    rings: Sequence[Sequence[int]],
    keys: Sequence[Hashable],
    *,
    by_rings: bool = True,
) -> tuple[tuple[int, ...], EqualLinks]:
    """Partition the copies: each one's first of its class, and links if only those are simulated.

    `copies`: for each copy, rank of copy 0 -> the rank in its place; `edges`: pairs of ranks of
    copy 0 that send something; `rings`: the ranks of each collective, which loads the links of its
    ring once; `keys`: what must be equal in copies of one class to begin with; `by_rings`: whether
    rings tell copies apart.
    """
    network = _CopyNetwork(comm, copies, edges, rings)
    classes = numbered(keys)
    while True:
        colours, loads = network.colours(classes, with_rings=by_rings)
        finer = numbered(
            [
                (
                    classes[copy],
                    tuple(tuple(sorted(colours[name] for name in path)) for path in paths),
                )
                for copy, paths in enumerate(network.paths)
            ]
        )
        if max(finer) == max(classes):
            break
        classes = finer
    if not by_rings:  # links differ by them in any case
        colours, loads = network.colours(classes)
    first = tuple(classes.index(number) for number in classes)
    one_of: dict[int, str] = {}
    return first, EqualLinks(
        same_as={name: one_of.setdefault(colour, name) for name, colour in colours.items()},
        copies={
            (copies[copy][edge[0]], copies[copy][edge[1]]): {
                name: loads[name][number, classes[copy]] for name in path
            }
            for copy in sorted(set(first))
            for number, (edge, path) in enumerate(zip(edges, network.paths[copy], strict=True))
        },
    )


class _CopyNetwork:
    """The links that each copy's transfers and the collectives cross."""

    def __init__(
        self,
        comm: CommCost,
        copies: Sequence[Mapping[int, int]],
        edges: Sequence[Edge],
        rings: Sequence[Sequence[int]],
    ) -> None:
        self.comm = comm
        self.capacity: dict[str, float] = {}
        self.paths = [
            [self._path(names[source], names[target]) for source, target in edges]
            for names in copies
        ]
        """Copy -> names of the links on the way of each of its transfers."""
        self.rings = [
            tuple(
                dict.fromkeys(
                    name
                    for pair in zip(ring, [*ring[1:], ring[0]], strict=True)
                    for name in self._path(*pair)
                )
            )
            for ring in rings
            if len(ring) > 1
        ]

    def _path(self, source: int, target: int) -> tuple[str, ...]:
        found = dict(self.comm.shared_links(source, target))
        self.capacity.update(found)
        return tuple(found)

    def colours(
        self, classes: Sequence[int], *, with_rings: bool = True
    ) -> tuple[dict[str, int], dict[str, Counter[Hashable]]]:
        """Link -> its colour, and link -> (number of the transfer, class) -> copies on it."""
        loads: dict[str, Counter[Hashable]] = {name: Counter() for name in self.capacity}
        for copy, paths in enumerate(self.paths):
            for number, path in enumerate(paths):
                for name in path:
                    loads[name][number, classes[copy]] += 1
        for number, ring in enumerate(self.rings if with_rings else ()):
            for name in ring:
                loads[name]["ring", number] += 1
        keys = [(self.capacity[name], frozenset(load.items())) for name, load in loads.items()]
        return dict(zip(loads, numbered(keys), strict=True)), loads


@dataclass(frozen=True, kw_only=True)
class EqualRanks:
    """The ranks to simulate, and for whom they stand."""

    lists: Mapping[int, tuple[Action, ...]]
    """Rank -> its list, with the names of the whole plan."""
    stands_in: tuple[int, ...]
    """Global rank -> the rank that stands for it."""
    links: EqualLinks

    @classmethod
    def all_different(cls, plan: Plan, lists: ActionLists) -> "EqualRanks":
        """Every rank stands for itself."""
        return cls(
            lists=dict(enumerate(lists.ranks)),
            stands_in=tuple(range(plan.world_size)),
            links=EqualLinks(),
        )


def find_equal_ranks(sizes: RankSizes, fixed_bytes: Sequence[int]) -> EqualRanks | None:
    """Return one copy of each class; None where nothing can be merged."""
    plan = sizes.plan
    copies = Copies.of(plan) if _may_be_merged(sizes) else None
    if copies is None or copies.count == 1:
        return None
    lists = lower_unless_stuck(copies.reduced_plan())
    if lists is None:
        return None
    messages = _messages(copies.renamed(lists, 0))
    first, links = classify_copies(
        sizes.costs.comm,
        copies.counterparts,
        list(messages),
        [group.ranks for group in plan.groups],
        [_look(sizes, fixed_bytes, messages, names) for names in copies.counterparts],
        by_rings=plan.world_size <= MOST_TOLD_APART,
    )
    simulated = sorted(set(first))
    if len(simulated) == copies.count:
        return None
    renamed = [copies.renamed(lists, copy) for copy in simulated]
    return EqualRanks(
        lists={rank: actions for part in renamed for rank, actions in part.items()},
        stands_in=copies.stands_in(first),
        links=links,
    )


def _may_be_merged(sizes: RankSizes) -> bool:
    """Whether copies swap nothing, and replicas of each group have the same work, in the same order
    (which halves of micro-batches change)."""
    plan = sizes.plan
    swaps = sizes.tied and plan.chunks[0].group != plan.chunks[-1].group
    halves = any(each.halved for group in plan.groups for each in group.replicas)
    if swaps or halves or sizes.has_wide_replicas or Lanes.of(plan) is not None:
        return False
    offloads = ranks_that_offload(plan, "parameters"), ranks_that_offload(plan, "gradients")
    return all(_is_even(group, offloads) for group in plan.groups)


def _look(
    sizes: RankSizes,
    fixed_bytes: Sequence[int],
    messages: Mapping[Edge, set[int]],
    names: Mapping[int, int],
) -> Hashable:
    """What must be equal in copies of one class to begin with. `names`: see `classify_copies`."""
    plan, costs = sizes.plan, sizes.costs
    ranks = [
        (
            costs.kinds[rank],
            fixed_bytes[rank],
            sizes.settings[rank],
            *(sizes.shards[c][rank] for c in sizes.chunks(rank)),
            _of_experts(sizes, rank),
        )
        for rank in names.values()
    ]
    seconds = [
        costs.comm.transfer_s(names[source], names[target], sizes.memory.boundary_bytes(count))
        for (source, target), counts in messages.items()
        for count in (0, *sorted(counts))
    ]
    last = plan.world_size - 1
    # The job's last rank, where it does not know the loss.
    waits_for_loss = last not in plan.groups[plan.chunks[-1].group].ranks
    is_told_apart = waits_for_loss and plan.world_size <= MOST_TOLD_APART
    return (*ranks, *seconds, is_told_apart and last in names.values())


def _of_experts(sizes: RankSizes, rank: int) -> Hashable:
    """What decides how long a rank waits for those that share experts with it."""
    if sizes.framework.expert_parallel == 1:
        return None
    ranks, num_bytes = sizes.shares_experts(rank, sizes.chunks(rank)[0]), sizes.boundary_bytes(1, 0)
    kinds = frozenset(sizes.costs.kinds[each] for each in ranks)
    return kinds, sizes.once_s(rank, sizes.chunks(rank)[0], num_bytes)


def _is_even(group: Group, offloads: Sequence[frozenset[int]]) -> bool:
    """Whether replicas with as many micro-batches, and all have some, have the same work, and all
    replicas the same actions of the whole group in their lists.

    `offloads`: ranks that offload parameters, and gradients.
    """
    of_group = {
        (len(replica.ranks), *(replica.ranks[0] in ranks for ranks in offloads))
        for replica in group.replicas
    }
    work = {
        (
            replica.num_microbatches,
            replica.micro_batch_size,
            replica.compute_s,
            replica.max_in_flight,
            replica.max_delayed_wgrad,
        )
        for replica in group.replicas
    }
    classes = _classes(group)
    return (
        len(of_group) == 1
        and len(work) == len(classes)
        and 0 not in classes
        and all(_are_apart(one, other) for one, other in combinations(classes.items(), 2))
    )


def _classes(group: Group) -> dict[int, list[int]]:
    """Number of micro-batches -> the replicas that have as many."""
    found: dict[int, list[int]] = {}
    for number, replica in enumerate(group.replicas):
        found.setdefault(replica.num_microbatches, []).append(number)
    return found


def _are_apart(one: tuple[int, list[int]], other: tuple[int, list[int]]) -> bool:
    """Whether the rounds of two classes (micro-batches, replicas) are never mixed.

    (2 i + 1) / (2 n) = (2 j + 1) / (2 n') has solutions only if the same power of 2 divides both.
    """
    (count, numbers), (other_count, others) = one, other
    if count & -count != other_count & -other_count:
        return True
    return numbers[-1] < others[0] or others[-1] < numbers[0]


def _messages(lists: Mapping[int, Sequence[Action]]) -> dict[Edge, set[int]]:
    """(source, target) -> numbers of samples that are sent at once."""
    found: dict[Edge, set[int]] = {}
    for rank, actions in lists.items():
        for action in actions:
            if action.kind in SENDS:
                assert action.peer is not None and action.samples is not None
                count = action.samples[1] - action.samples[0]
                found.setdefault((rank, action.peer), set()).add(count)
    return found


@dataclass(frozen=True, kw_only=True)
class Copies:
    """A plan of equal work as several pipelines: r = `period`, L = `block` samples."""

    plan: Plan
    period: int
    block: int

    @classmethod
    def of(cls, plan: Plan) -> "Copies":
        """The finest cut; one copy where the blocks do not fit."""
        rounds, sizes = [], []
        for group in plan.groups:
            for numbers in _classes(group).values():
                sizes.append(group.replicas[numbers[0]].micro_batch_size)
                rounds.append(len(numbers) * sizes[-1])
        period, block = math.gcd(*rounds), math.lcm(*sizes)
        cut = cls(plan=plan, period=period, block=block if period % block == 0 else period)
        if all(cut._is_alike(number) for number in range(len(plan.groups))):
            return cut
        return cls(plan=plan, period=period, block=period)

    def _is_alike(self, number: int) -> bool:
        """Whether replicas of the classes follow one another in the same order in each copy."""
        replicas = self.plan.groups[number].replicas
        orders = {
            tuple(replicas[member].num_microbatches for member in self._in_group(number, copy))
            for copy in range(self.count)
        }
        return len(orders) == 1

    @property
    def count(self) -> int:
        """g: how many copies."""
        return self.period // self.block

    def reduced_plan(self) -> Plan:
        """One copy as a plan of its own, with ranks from 0 in the order of groups and replicas."""
        groups, first = [], 0
        for number, group in enumerate(self.plan.groups):
            replicas = tuple(
                dataclasses.replace(
                    group.replicas[member],
                    ranks=(first + index,),
                    shard_weight=1.0,
                )
                for index, member in enumerate(self._in_group(number, 0))
            )
            # Recomputation does not change the lists; of offloading that of parameters and
            # gradients does, which all replicas have or none.
            groups.append(
                Group(
                    replicas=replicas,
                    offload=group.offload,
                    split_backward=group.split_backward,
                )
            )
            first += len(replicas)
        return dataclasses.replace(
            self.plan,
            global_batch_size=self.plan.global_batch_size // self.count,
            groups=tuple(groups),
            cluster=None,
            predictions=None,
        )

    def renamed(self, lists: ActionLists, copy: int) -> dict[int, tuple[Action, ...]]:
        """The reduced plan's lists with the whole plan's names of a copy."""
        names = list(self._members(copy))
        return {
            names[rank]: tuple(self._renamed(action, names, copy) for action in actions)
            for rank, actions in enumerate(lists.ranks)
        }

    @cached_property
    def counterparts(self) -> tuple[dict[int, int], ...]:
        """Copy -> rank of copy 0 -> the rank that is in its place."""
        names = list(self._members(0))
        return tuple(
            dict(zip(names, self._members(copy), strict=True)) for copy in range(self.count)
        )

    def stands_in(self, first: Sequence[int]) -> tuple[int, ...]:
        """Global rank -> its counterpart in the first copy of its class."""
        found = {
            rank: self.counterparts[first[copy]][original]
            for copy, names in enumerate(self.counterparts)
            for original, rank in names.items()
        }
        return tuple(found[rank] for rank in range(self.plan.world_size))

    def _members(self, copy: int) -> Iterator[int]:
        """Ranks of a copy, in the order in which the reduced plan counts them."""
        for number, group in enumerate(self.plan.groups):
            for member in self._in_group(number, copy):
                yield group.replicas[member].ranks[0]

    def _in_group(self, number: int, copy: int) -> list[int]:
        """The replicas of a group that are in a copy, ascending."""
        group, found = self.plan.groups[number], []
        for members in _classes(group).values():
            size = group.replicas[members[0]].micro_batch_size
            for index in range(len(members) // self.count):
                found.append(members[self._sample(index * size, copy) // size])
        return sorted(found)

    def _sample(self, sample: int, copy: int) -> int:
        """The whole plan's name of a copy's sample."""
        block, offset = divmod(sample, self.block)
        return block * self.period + copy * self.block + offset

    def _renamed(self, action: Action, names: Sequence[int], copy: int) -> Action:
        if action.kind not in TRANSFERS:
            return action
        assert action.peer is not None and action.samples is not None
        start = self._sample(action.samples[0], copy)
        stop = start + action.samples[1] - action.samples[0]
        return action._replace(peer=names[action.peer], samples=(start, stop))
