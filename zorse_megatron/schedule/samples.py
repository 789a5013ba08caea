"""Which samples go where, and what of them travels between chunks: derived from the plan alone.

Every group covers the global batch, samples 0 to `global_batch_size - 1` in Megatron's order, with
micro-batches that are contiguous intervals of it. The micro-batches of all replicas of a group are
laid out in the order in which equally loaded replicas would finish them, so that every replica
works on early samples early and the next group can start. With equal replicas this is the order
of Megatron's own data-parallel sampler (`MegatronPretrainingSampler`).

Replicas in several regions share the samples out by `samples`, so that few change region.

Between two groups, a micro-batch may feed parts of several micro-batches, and be fed by several:
the pieces are the overlaps of their intervals. No divisibility is asked for.
"""

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, pairwise
from operator import attrgetter

from zorse_megatron.plan.plan import Group, Plan, Replica

# Samples of a plan whose replicas are in several regions: few of them change region.
#
# Every region has a lane: an interval of the global batch, as long as what its replicas run in a
# group. Lanes follow one another in the order of the regions' names. So where two groups have
# equally long lanes no sample changes region between them, and with two regions never more do than
# the difference: there is no better way. With more regions a sample may change although a better
# way exists, if lanes differ in length.
#
# Which samples are in a lane is thus settled; when they run is not. Samples between the ends of two
# groups' lanes change region, and should do so throughout the step, not at its end. So the batch is
# cut at the ends of all groups' lanes into bands, and each group works at all bands of a lane at
# the same time, in proportion to their lengths. In every second band it works backwards: then
# samples on both sides of a cut run at the same time, and a micro-batch may straddle it.


@dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """A micro-batch whose samples are not known yet."""

    size: int
    region: str | None


@dataclass(frozen=True, kw_only=True)
class Lanes:
    """Where bands end: the first is 0, the last the size of the global batch."""

    cuts: tuple[int, ...]
    least: int
    """Samples below which a band is not worth while: what a group runs at once."""

    @classmethod
    def of(cls, plan: Plan) -> "Lanes | None":
        """None where all replicas of the plan are in one region."""
        replicas = [replica for group in plan.groups for replica in group.replicas]
        names = _ordered({replica.region for replica in replicas if replica.num_microbatches})
        if len(names) < 2:
            return None
        ends = {end for group in plan.groups for end in _lane_ends(group, names)}
        least = max(
            sum(each.micro_batch_size for each in group.replicas if each.num_microbatches)
            for group in plan.groups
        )
        cuts = [0]
        for end in sorted(ends):
            if end - cuts[-1] >= least and plan.global_batch_size - end >= least:
                cuts.append(end)
        return cls(cuts=(*cuts, plan.global_batch_size), least=least)

    def starts(self, slots: Sequence[Slot]) -> list[int]:
        """The first sample of each of a group's micro-batches, which are in their order of time."""
        lanes: dict[str | None, list[int]] = defaultdict(list)
        for number, slot in enumerate(slots):
            lanes[slot.region].append(number)
        found, first = [0] * len(slots), 0
        for region in _ordered(lanes):
            sizes = [slots[number].size for number in lanes[region]]
            for place in self._in_sample_order(first, sizes):
                number = lanes[region][place]
                found[number] = first
                first += slots[number].size
        return found

    def _in_sample_order(self, first: int, sizes: Sequence[int]) -> Iterable[int]:
        """The numbers of a lane's micro-batches, which are given in their order of time."""
        stop = first + sum(sizes)
        inside = (cut for cut in self.cuts if first + self.least <= cut <= stop - self.least)
        ends = list(pairwise([first, *inside, stop]))
        bands = [end - start for start, end in ends]
        members: list[list[int]] = [[] for _ in bands]
        filled, done = [0] * len(bands), 0
        for place, size in enumerate(sizes):
            done += size
            # Largest shortfall against its part of what is done, in integers.
            band = max(
                range(len(bands)),
                key=lambda b: bands[b] * done - filled[b] * (stop - first),
            )
            members[band].append(place)
            filled[band] += size
        for (start, end), places in zip(ends, members, strict=True):
            number = bisect_right(self.cuts, (start + end) // 2)
            yield from places if number % 2 else reversed(places)


def _lane_ends(group: Group, names: Sequence[str | None]) -> Iterable[int]:
    samples: dict[str | None, int] = defaultdict(int)
    for replica in group.replicas:
        samples[replica.region] += replica.num_samples
    return accumulate(samples[name] for name in names)


def _ordered(regions: Iterable[str | None]) -> list[str | None]:
    return sorted(regions, key=lambda region: region or "")


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """One micro-batch of one replica: samples [start, stop) of the global batch.

    `index` counts the replica's own micro-batches, in execution order. `turn` is how many samples
    its group runs before it, if all replicas are equally loaded: `start`, but for regions.
    """

    replica: int
    index: int
    start: int
    stop: int
    turn: int

    @property
    def size(self) -> int:
        """Number of samples."""
        return self.stop - self.start

    @property
    def key(self) -> "MicroBatchKey":
        """Its name within its group."""
        return self.replica, self.index


MicroBatchKey = tuple[int, int]
"""(replica, index) of a micro-batch in its group."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Samples [start, stop) that travel from one micro-batch to one of the next group."""

    source: MicroBatch
    target: MicroBatch
    start: int
    stop: int


def micro_batches(group: Group, lanes: Lanes | None = None) -> tuple[MicroBatch, ...]:
    """Lay a group's micro-batches out over the global batch, in the order of their turns.

    `lanes`: of a plan with several regions.
    """
    # At the middle of its samples among the replica's, in integers.
    whole = math.lcm(*(replica.num_samples or 1 for replica in group.replicas))
    finish_order = sorted(
        ((2 * before + size) * (whole // replica.num_samples), number, index, size)
        for number, replica in enumerate(group.replicas)
        for index, (before, size) in enumerate(
            zip(accumulate(replica.sizes, initial=0), replica.sizes, strict=False)
        )
    )
    sizes = [size for *_, size in finish_order]
    turns = list(accumulate(sizes, initial=0))
    starts: Sequence[int] = turns
    if lanes is not None:
        regions = [group.replicas[number].region for _, number, *_ in finish_order]
        starts = lanes.starts([Slot(size=s, region=r) for s, r in zip(sizes, regions, strict=True)])
    return tuple(
        MicroBatch(replica=number, index=index, start=start, stop=start + size, turn=turn)
        for (_, number, index, size), start, turn in zip(finish_order, starts, turns, strict=False)
    )


def pieces(sources: Sequence[MicroBatch], targets: Sequence[MicroBatch]) -> tuple[Piece, ...]:
    """Overlaps of two layouts of the same global batch, in sample order.

    O(sources + targets) where these are in sample order, else O(n log n).
    """
    sources, targets = (sorted(each, key=attrgetter("start")) for each in (sources, targets))
    found = []
    left = right = 0
    while left < len(sources) and right < len(targets):
        source, target = sources[left], targets[right]
        start, stop = max(source.start, target.start), min(source.stop, target.stop)
        if start < stop:
            found.append(Piece(source=source, target=target, start=start, stop=stop))
        if source.stop <= target.stop:
            left += 1
        if target.stop <= source.stop:
            right += 1
    return tuple(found)


def rank_micro_batches(plan: Plan, rank: int) -> tuple[MicroBatch, ...]:
    """The micro-batches that `rank` runs, in execution order.

    Of a replica whose ranks share experts alone: its own samples of each, which may be none.
    """
    group, index = plan.replica_of_rank(rank)
    replica = plan.groups[group].replicas[index]
    laid_out = micro_batches(plan.groups[group], Lanes.of(plan))
    place = replica.ranks.index(rank)
    return tuple(rank_part(each, replica, place) for each in laid_out if each.replica == index)


def rank_part(micro_batch: MicroBatch, replica: Replica, index: int) -> MicroBatch:
    """The samples of a micro-batch that rank `index` of the replica has."""
    if replica.expert_parallel is None:
        return micro_batch
    samples = replica.expert_parallel.samples
    start = micro_batch.start + sum(samples[:index])
    return replace(micro_batch, start=start, stop=start + samples[index])


# What travels between neighbouring chunks, laid out once for a whole plan.


Link = tuple[int, int, int]
"""(replica, index, number of samples): where samples of a micro-batch go to, or come from."""


@dataclass(kw_only=True)
class Boundary:
    """Between a group and another one, or itself; the same wherever the two meet.

    Activations go along it, gradients back. Pieces are in sample order.
    """

    is_local: bool
    """Whether both ends are the same group, so that nothing leaves a rank."""
    by_source: dict[MicroBatchKey, list[Piece]] = field(default_factory=dict)
    by_target: dict[MicroBatchKey, list[Piece]] = field(default_factory=dict)

    @cached_property
    def onward(self) -> Mapping[int, Sequence[Sequence[Link]]]:
        """Source replica -> of each of its micro-batches, the targets."""
        return _links(self.by_source, attrgetter("target"))

    @cached_property
    def back(self) -> Mapping[int, Sequence[Sequence[Link]]]:
        """Target replica -> of each of its micro-batches, the sources."""
        return _links(self.by_target, attrgetter("source"))


def _links(
    pieces_of: Mapping[MicroBatchKey, Sequence[Piece]], end: Callable[[Piece], MicroBatch]
) -> dict[int, list[list[Link]]]:
    found: dict[int, list[list[Link]]] = {}
    for replica, index in sorted(pieces_of):
        links = []
        for piece in pieces_of[replica, index]:
            other = end(piece)
            links.append((other.replica, other.index, piece.stop - piece.start))
        found.setdefault(replica, []).append(links)
    return found


class Boundaries:
    """Every group's micro-batches, and the boundary after each chunk."""

    def __init__(self, plan: Plan) -> None:
        self.groups = tuple(chunk.group for chunk in plan.chunks)
        """Chunk -> the number of its group."""
        self.last = len(self.groups) - 1
        lanes = Lanes.of(plan)
        laid_out = [_LAYOUTS.of(group, lanes) for group in plan.groups]
        self.queues = [each.queues for each in laid_out]
        """Group -> replica -> its micro-batches in order; only replicas that have any."""
        self.after_chunk = [
            _LAYOUTS.boundary(laid_out[source], laid_out[target], is_local=source == target)
            for source, target in pairwise(self.groups)
        ]
        """Chunk -> the boundary to the next chunk."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Layout:
    micro_batches: tuple[MicroBatch, ...]
    queues: dict[int, tuple[MicroBatch, ...]]


class _Layouts:
    """Layouts and boundaries that were made before: the plans of a search share most of them.

    They hold up to so many micro-batches and pieces; then all are forgotten.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._held = 0
        self._layouts: dict[object, _Layout] = {}
        self._boundaries: dict[tuple[_Layout, _Layout, bool], Boundary] = {}

    def of(self, group: Group, lanes: Lanes | None) -> _Layout:
        """The group's layout."""
        work = [
            (r.micro_batch_size, r.num_microbatches, r.halved, r.region) for r in group.replicas
        ]
        key = tuple(work), lanes
        found = self._layouts.get(key)
        if found is None:
            laid_out = micro_batches(group, lanes)
            self._hold(len(laid_out))
            found = _Layout(micro_batches=laid_out, queues=_by_replica(laid_out))
            self._layouts[key] = found
        return found

    def boundary(self, source: _Layout, target: _Layout, *, is_local: bool) -> Boundary:
        """Between two groups that are laid out like this."""
        key = source, target, is_local
        found = self._boundaries.get(key)
        if found is None:
            found = Boundary(is_local=is_local)
            between = pieces(source.micro_batches, target.micro_batches)
            self._hold(len(between))
            for piece in between:
                found.by_source.setdefault(piece.source.key, []).append(piece)
                found.by_target.setdefault(piece.target.key, []).append(piece)
            self._boundaries[key] = found
        return found

    def _hold(self, more: int) -> None:
        self._held += more
        if self._held > self._most:
            self._held = more
            self._layouts.clear()
            self._boundaries.clear()


_LAYOUTS = _Layouts(most=200_000)


def _by_replica(layout: tuple[MicroBatch, ...]) -> dict[int, tuple[MicroBatch, ...]]:
    queues: dict[int, list[MicroBatch]] = {}
    for micro_batch in layout:
        queues.setdefault(micro_batch.replica, []).append(micro_batch)
    return {replica: tuple(queue) for replica, queue in sorted(queues.items())}
