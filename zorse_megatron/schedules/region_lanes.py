"""Samples of a plan whose replicas are in several regions: few of them change region.

Every region has a lane: an interval of the global batch, as long as what its replicas run in a
group. Lanes follow one another in the order of the regions' names. So where two groups have equally
long lanes no sample changes region between them, and with two regions never more do than the
difference: there is no better way. With more regions a sample may change although a better way
exists, if lanes differ in length.

Which samples are in a lane is thus settled; when they run is not. Samples between the ends of two
groups' lanes change region, and should do so throughout the step, not at its end. So the batch is
cut at the ends of all groups' lanes into bands, and each group works at all bands of a lane at the
same time, in proportion to their lengths. In every second band it works backwards: then samples on
both sides of a cut run at the same time, and a micro-batch may straddle it.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from zorse_megatron.schema.plan.plan import Group, Plan


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
