"""Plans that differ from one by one step in groups, micro-batch sizes, recompute or offload."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from zorse_megatron.plan.memory_settings import settings_in
from zorse_megatron.plan.plan import Group, Halved, Offload, Plan, Recompute, Replica
from zorse_megatron.planner.build_plan import with_regions
from zorse_megatron.planner.closed_form.device_groups import ReplicaClass, ReplicaShare, best_split
from zorse_megatron.planner.evaluate import Evaluator
from zorse_megatron.planner.orders import GroupOrder
from zorse_megatron.planner.search.effort import LEVELS
from zorse_megatron.planner.search.orders_in_memory import Ranks
from zorse_megatron.planner.search.placements import Rows, rows_of, with_placement, without_seams


@dataclass(frozen=True, kw_only=True)
class Near:
    """A plan to try."""

    plan: Plan
    orders: tuple[GroupOrder, ...]
    """Of its groups."""
    changed: frozenset[Ranks] = frozenset()
    """Replicas whose memory is not what it was, but for their layers."""


_Members = Sequence[Sequence[Replica]]
"""Group -> its replicas, each with its own settings."""


class PlanMoves:
    """Finds them, for plans whose replicas are single ranks."""

    def __init__(self, evaluator: Evaluator) -> None:
        self.inputs = evaluator.inputs
        self.layer = evaluator.inputs.compute.layer
        self._dealt: dict[object, tuple[ReplicaShare, ...] | None] = {}

    def around(self, plan: Plan, orders: tuple[GroupOrder, ...]) -> Iterator[Near]:
        """All steps; what they yield may break the plan file's rules, or not fit."""
        members = [[_bare(group, replica) for replica in group.replicas] for group in plan.groups]
        if any(len(each.ranks) > 1 for group in members for each in group):
            return
        yield from self._merged(plan, members, orders)
        yield from self._split(plan, members, orders)
        yield from self._moved(plan, members, orders)
        yield from self._all_groups(plan, members, orders)
        for number, group in enumerate(members):
            for other in (*self._sizes(group), *self._settings(group)):
                found = self._with(plan, [*members[:number], other, *members[number + 1 :]])
                changed = frozenset(replica.ranks for replica in other)
                yield Near(plan=found, orders=orders, changed=changed)

    def _all_groups(
        self, plan: Plan, members: _Members, orders: tuple[GroupOrder, ...]
    ) -> Iterator[Near]:
        """One setting for everyone."""
        space, everyone = self.inputs.space, [each for group in members for each in group]
        ways: list[dict[str, Any]] = [{"recompute": each} for each in self._modes()]
        if space.offload:
            ways += [{"offload": each} for each in (None, Offload(optimizer_state=True))]
        for way in ways:
            changed = frozenset(each.ranks for each in everyone if replace(each, **way) != each)
            groups = [[replace(each, **way) for each in group] for group in members]
            yield Near(plan=self._with(plan, groups), orders=orders, changed=changed)

    # Groups.

    def _merged(
        self, plan: Plan, members: _Members, orders: tuple[GroupOrder, ...]
    ) -> Iterator[Near]:
        """Two groups as one, which has the layers of both."""
        for one, other in combinations(range(len(members)), 2):
            if len(members) == 2:
                return
            numbers = {group: group - (group > other) for group in range(len(members))}
            numbers[other] = one
            rows = without_seams([(numbers[group], layers) for group, layers in rows_of(plan)])
            groups = [[*each] for number, each in enumerate(members) if number != other]
            groups[one] = sorted(
                (*members[one], *members[other]), key=lambda replica: replica.ranks
            )
            kept = (*orders[:other], *orders[other + 1 :])
            yield from self._regrouped(plan, groups, rows, kept, [one])

    def _split(
        self, plan: Plan, members: _Members, orders: tuple[GroupOrder, ...]
    ) -> Iterator[Near]:
        """A group as two, the second of which follows the first in each chunk."""
        if len(members) == (self.inputs.space.max_groups or self.inputs.num_layers):
            return
        for number, group in enumerate(members):
            for first in self._parts(group):
                second = [each for each in group if each not in first]
                part = self._speed(first) / self._speed(group)
                new = len(members)
                rows = []
                for owner, layers in rows_of(plan):
                    if owner == number and layers > 1:
                        own = min(layers - 1, max(1, round(part * layers)))
                        rows += [(number, own), (new, layers - own)]
                    else:
                        rows.append((owner, layers))
                if all(owner != new for owner, _ in rows):
                    continue
                groups = [*members[:number], first, *members[number + 1 :], second]
                yield from self._regrouped(
                    plan, groups, tuple(rows), (*orders, orders[number]), [number, new]
                )

    def _parts(self, group: Sequence[Replica]) -> Iterator[list[Replica]]:
        """Halves of it, and its kinds of GPUs."""
        if len(group) < 2:
            return
        yield [*group[: len(group) // 2]]
        kinds = list(dict.fromkeys(map(self._kind, group)))
        for kind in kinds if len(kinds) > 1 else ():
            yield [each for each in group if self._kind(each) == kind]

    def _moved(
        self, plan: Plan, members: _Members, orders: tuple[GroupOrder, ...]
    ) -> Iterator[Near]:
        """A replica to another group, with its part of the layers."""
        for source, group in enumerate(members):
            tried = set()
            for replica in group if len(group) > 1 else ():
                node = self.inputs.spec.node_of(replica.ranks[0])
                if (node, self._kind(replica)) in tried:
                    continue
                tried.add((node, self._kind(replica)))
                part = self._speed([replica]) / self._speed(group)
                for target in range(len(members)):
                    if target == source:
                        continue
                    groups = [[*each] for each in members]
                    groups[source].remove(replica)
                    groups[target] = sorted((*groups[target], replica), key=lambda each: each.ranks)
                    rows = _with_layers_moved(rows_of(plan), source, target, part)
                    yield from self._regrouped(plan, groups, rows, orders, [source, target])

    def _regrouped(
        self,
        plan: Plan,
        members: _Members,
        rows: Rows,
        orders: tuple[GroupOrder, ...],
        numbers: Sequence[int],
    ) -> Iterator[Near]:
        """The plan with these groups; those with these `numbers` deal out their batch anew."""
        groups = [[*each] for each in members]
        for number in numbers:
            dealt = self._deal([replace(each, shard_weight=1.0) for each in groups[number]])
            if dealt is None:
                return
            groups[number] = [*dealt]
        changed = frozenset(each.ranks for number in numbers for each in groups[number])
        found = with_placement(self._with(plan, groups), rows)
        yield Near(plan=found, orders=orders, changed=changed)

    # One group's replicas.

    def _sizes(self, group: Sequence[Replica]) -> Iterator[Sequence[Replica]]:
        """Larger or smaller micro-batches on GPUs of one kind."""
        levels = self.inputs.space.sizes(LEVELS)
        most = self.inputs.space.max_micro_batch_size or max(levels)
        for kind in dict.fromkeys(map(self._kind, group)):
            size = max(each.micro_batch_size for each in group if self._kind(each) == kind)
            larger = min((each for each in levels if each > size), default=size)
            smaller = max((each for each in levels if each < size), default=size)
            for other in {min(larger, most), smaller} - {size}:
                dealt = self._deal(
                    [
                        replace(each, micro_batch_size=other) if self._kind(each) == kind else each
                        for each in group
                    ]
                )
                if dealt is not None:
                    yield dealt

    def _settings(self, group: Sequence[Replica]) -> Iterator[Sequence[Replica]]:
        """Other recompute or offload of GPUs of one kind."""
        space = self.inputs.space
        for kind in dict.fromkeys(map(self._kind, group)):
            mine = [each for each in group if self._kind(each) == kind]
            others = [replace(mine[0], recompute=each) for each in self._recomputes(mine[0])]
            if space.offload:
                offload = mine[0].offload or Offload()
                state = replace(offload, optimizer_state=not offload.optimizer_state)
                others.append(replace(mine[0], offload=None if state == Offload() else state))
            for other in others:
                yield [
                    replace(each, recompute=other.recompute, offload=other.offload)
                    if each in mine
                    else each
                    for each in group
                ]

    def _recomputes(self, replica: Replica) -> Iterator[Recompute | None]:
        here = replica.recompute
        yield from (each for each in self._modes() if each != here)
        if here is not None and here.mode == "full" and here.num_layers:
            for num_layers in (here.num_layers - 1, here.num_layers + 1):
                if num_layers:
                    yield replace(here, num_layers=num_layers)

    def _modes(self) -> Iterator[Recompute | None]:
        for mode in self.inputs.space.recompute:
            yield None if mode == "none" else Recompute(mode=mode)  # type: ignore[arg-type]

    def halved(self, plan: Plan, orders: tuple[GroupOrder, ...]) -> Iterator[Near]:
        """The first or the last micro-batches of one group, or of all, run in halves or not."""
        members = [[_bare(group, replica) for replica in group.replicas] for group in plan.groups]
        if any(len(each.ranks) > 1 for group in members for each in group):
            return
        for numbers in (*((number,) for number in range(len(members))), tuple(range(len(members)))):
            for step in ((1, 0), (0, 1), (1, 1), (-1, 0), (0, -1)):
                groups = [
                    [self._with_halves(each, step) if number in numbers else each for each in group]
                    for number, group in enumerate(members)
                ]
                changed = frozenset(
                    each.ranks
                    for before, after in zip(members, groups, strict=True)
                    for old, each in zip(before, after, strict=True)
                    if old != each
                )
                if changed:
                    yield Near(plan=self._with(plan, groups), orders=orders, changed=changed)

    def _with_halves(self, replica: Replica, step: tuple[int, int]) -> Replica:
        halved, size = replica.halved or Halved(), replica.micro_batch_size
        first, last = halved.first + step[0], halved.last + step[1]
        cuts_blocks = size % (2 * self.inputs.space.sample_block)
        if cuts_blocks or min(first, last) < 0 or first + last > replica.num_microbatches:
            return replica
        if not first + last:
            return replace(replica, halved=None)
        half, whole = (self.layer(self._kind(replica), each).both_s for each in (size // 2, size))
        part = float(f"{min(1.0, half / whole):.3g}")
        return replace(replica, halved=Halved(first=first, last=last, time_of_half=part))

    def _deal(self, group: Sequence[Replica]) -> tuple[Replica, ...] | None:
        """The same replicas with micro-batches up to their sizes, in as little time as possible."""
        key = tuple((self._kind(each), each.micro_batch_size) for each in group)
        if key not in self._dealt:
            self._dealt[key] = self._shares(key)
        dealt = self._dealt[key]
        if dealt is None:
            return None
        return tuple(
            replace(
                each,
                micro_batch_size=one.micro_batch_size,
                num_microbatches=one.num_microbatches,
                halved=None,
            )
            for each, one in zip(group, dealt, strict=True)
        )

    def _shares(self, keys: Sequence[tuple[str, int]]) -> tuple[ReplicaShare, ...] | None:
        """Of replicas by kind and largest micro-batch."""
        classes = list(dict.fromkeys(keys))
        split = best_split(
            self.inputs.global_batch_size,
            [
                ReplicaClass(
                    count=keys.count((kind, most)),
                    times_s={
                        size: self.layer(kind, size).both_s
                        for size in self.inputs.space.sizes_to(most)
                    },
                )
                for kind, most in classes
            ],
        )
        if split is None:
            return None
        shares = {key: iter(row) for key, row in zip(classes, split, strict=True)}
        return tuple(next(shares[key]) for key in keys)

    def _with(self, plan: Plan, members: _Members) -> Plan:
        """The plan with these replicas."""
        groups = tuple(
            _group(replicas, self.inputs.dtype_of(rank for each in replicas for rank in each.ranks))
            for replicas in members
        )
        return with_regions(replace(plan, groups=groups), self.inputs.spec)

    def _kind(self, replica: Replica) -> str:
        return self.inputs.kinds[replica.ranks[0]]

    def _speed(self, group: Sequence[Replica]) -> float:
        """Samples times layers per second."""
        return sum(
            each.micro_batch_size / self.layer(self._kind(each), each.micro_batch_size).both_s
            for each in group
        )


def _bare(group: Group, replica: Replica) -> Replica:
    """With its own settings, and without what is to be found anew."""
    settings = settings_in(group, replica)
    return replace(
        replica,
        recompute=settings.recompute,
        offload=None if settings.offload == Offload() else settings.offload,
        region=None,
        compute_s=None,
        max_in_flight=None,
        max_delayed_wgrad=None,
    )


def _group(replicas: Sequence[Replica], compute_dtype: str | None) -> Group:
    """A group of these; what all of them do is said once."""
    said: Mapping[str, object] = {}
    if len({(each.recompute, each.offload) for each in replicas}) == 1:
        said = {"recompute": replicas[0].recompute, "offload": replicas[0].offload}
        replicas = [replace(each, recompute=None, offload=None) for each in replicas]
    return Group(replicas=tuple(replicas), compute_dtype=compute_dtype, **said)  # type: ignore[arg-type]


def _with_layers_moved(rows: Rows, source: int, target: int, part: float) -> Rows:
    """A part of one group's layers, from its largest chunk to the largest one of another group."""
    own = sum(layers for group, layers in rows if group == source)
    largest = {
        group: max((layers, -at) for at, (owner, layers) in enumerate(rows) if owner == group)
        for group in (source, target)
    }
    count = min(largest[source][0] - 1, round(part * own))
    found = list(rows)
    for group, change in ((source, -count), (target, count)):
        at = -largest[group][1]
        found[at] = (group, found[at][1] + change)
    return tuple(found)
