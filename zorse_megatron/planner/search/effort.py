"""The budget of a search by cluster size, and the groupings that it considers for that."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from zorse_megatron.planner.closed_form.candidate import balanced_layers
from zorse_megatron.planner.closed_form.device_groups import DeviceGroup
from zorse_megatron.planner.closed_form.estimator import Estimator
from zorse_megatron.planner.groupings.pools import Grouping, normalised, set_partitions
from zorse_megatron.planner.groupings.proposals import (
    GroupingProposal,
    neighbours,
    propose_groupings,
)
from zorse_megatron.planner.groupings.symmetry import Symmetry
from zorse_megatron.planner.inputs.search_inputs import Inputs

# The groupings that the search considers, most promising first.


# Every partition is looked at up to this many GPUs (203 of them, fewer without mirror images).
EVERY_PARTITION_UP_TO = 6
# What each further group adds to the score: it takes a little longer to fill the pipeline.
_PER_GROUP = 0.002


class Groupings:
    """Lists groupings with scores."""

    def __init__(self, estimator: Estimator) -> None:
        self.inputs = estimator.inputs
        self.estimator = estimator
        self.symmetry = Symmetry(self.inputs.spec)
        self.seen: set[int] = set()
        kinds = dict.fromkeys(self.inputs.kinds)
        self.speeds = {kind: 1 / self.inputs.compute.layer(kind, 1).both_s for kind in kinds}
        most = self.inputs.space.max_groups or self.inputs.num_layers
        self.most = min(most, self.inputs.num_layers, self.inputs.world_size)

    def start(self, limit: int) -> list[tuple[float, GroupingProposal]]:
        """Up to `limit` candidates with scores, best first."""
        listed: Iterator[GroupingProposal] = propose_groupings(
            self.inputs.spec, max_groups=self.most, limit=limit, speeds=self.speeds
        )
        if self.inputs.world_size <= EVERY_PARTITION_UP_TO:
            listed = self._every_partition()
        return self._scored(listed)

    def around(self, grouping: Grouping, limit: int) -> list[tuple[float, GroupingProposal]]:
        """New groupings one step from a given one, best first."""
        near = neighbours(self.inputs.spec, grouping, symmetry=self.symmetry, limit=limit)
        return self._scored(near)

    def _scored(self, found: Iterable[GroupingProposal]) -> list[tuple[float, GroupingProposal]]:
        rows = []
        for proposal in found:
            if not 0 < len(proposal.grouping) <= self.most:
                continue
            signature = self.symmetry.signature(proposal.grouping)
            if signature not in self.seen:
                self.seen.add(signature)
                rows.append((self.score(proposal.grouping), proposal))
        return sorted(rows, key=lambda row: (row[0], row[1].grouping))

    def score(self, grouping: Grouping) -> float:
        """Time of the slowest group over a perfect balance, and of the slowest last reduction."""
        members = [self.estimator.device_groups.of(group) for group in grouping]
        speeds = [self._speed(device_group) for device_group in members]
        layers, slowest = balanced_layers(self.inputs.num_layers, speeds)
        batch = self.inputs.global_batch_size
        even_s = batch * self.inputs.num_layers / sum(speeds)
        tail_s = self._tail_s(members, layers)
        return (batch * slowest + tail_s) / even_s + _PER_GROUP * len(grouping)

    def _tail_s(self, members: list[DeviceGroup], layers: tuple[int, ...]) -> float:
        """Gradients reduced and parameters gathered, on NICs that spread groups share."""
        communication, memory = self.estimator.communication, self.inputs.memory
        found = 0.0
        for device_group, count, num_sharing in zip(
            members, layers, communication.groups_sharing_a_node(members), strict=True
        ):
            parameters = count * memory.layer_parameters()
            num_bytes = memory.gradient_bytes(parameters) + memory.parameter_bytes(parameters)
            found = max(found, num_sharing * communication.even_gather_s(device_group, num_bytes))
        return found

    def _speed(self, device_group: DeviceGroup) -> float:
        return sum(
            len(gpu_class.ranks) * self.speeds[gpu_class.kind]
            for gpu_class in device_group.gpu_classes
        )

    def _every_partition(self) -> Iterator[GroupingProposal]:
        for groups in set_partitions(tuple(range(self.inputs.world_size))):
            yield GroupingProposal(grouping=normalised(groups), origin="every partition")


LEVELS = (1, 2, 3, 4, 6, 8, 16)
"""Micro-batch levels that a group may be moved to."""


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How much of everything the search does; it follows from the size of the cluster alone."""

    listed: int
    """Groupings that are scored."""
    costed: int
    """How many of those are costed with one schedule."""
    widened: int
    """Groupings whose neighbours are looked at, and that are costed with all schedules."""
    finalists: int
    """Plans that the simulator sees before the local search."""
    computations: int
    """Forwards and backwards that may be simulated in all."""
    finalists_part: float = 0.6
    """Share of these for finalists; the rest is for the local search."""
    quick_orders: int = 1
    """Orders of a grouping's groups that are looked at to see whether it is promising."""
    orders: int = 3
    """Orders of a grouping's groups that are costed."""
    levels: tuple[int, ...] = (1, 2, 4, 8)
    """Micro-batch levels that are costed."""
    partitions: int = 16
    """Partitions of device orders that are costed, for each schedule."""
    polished: int = 6
    """Estimates whose levels and order are improved by closed form."""
    slacks: tuple[float, ...] = (1.0,)
    """The values of 1f1b's slack that are costed."""
    level_steps: int = 1
    """By how many levels a group's micro-batch may change in one step of that."""
    keeps_all: bool = False
    """Whether all neighbours that are costed on the way may be simulated."""
    assignments: int = 2
    """Layer assignments that are kept of each candidate."""
    followed: int = 6
    """How many of the best evaluations the local search follows."""
    refits: int = 3
    """How often a neighbour that does not fit is built again with more memory left free."""
    tries: int = 10
    """Neighbours of an evaluation that are simulated, at most."""
    hopeless: float = 1.03
    """Finalists estimated at over this multiple of the best simulated time are not simulated."""
    tolerance: float = 1.1
    """Neighbours whose estimate is over this multiple are not simulated."""
    climb: int = 500_000
    """Forwards and backwards that may be ordered to make the fastest plans faster still."""

    @property
    def light(self) -> "Effort":
        """A small part of it: enough to see whether another search is worth all of it."""
        return replace(
            self,
            listed=-(-self.listed // 4),
            costed=-(-self.costed // 6),
            widened=-(-self.widened // 6),
            finalists=-(-self.finalists // 6),
            finalists_part=1.0,
            computations=-(-self.computations // 40),
            partitions=-(-self.partitions // 4),
            polished=1,
            orders=1,
            levels=(1, 2, 4),
            refits=min(self.refits, 1),
            tries=3,
        )

    @classmethod
    def of(cls, inputs: Inputs) -> "Effort":
        """More where GPUs are few."""
        if inputs.world_size <= EVERY_PARTITION_UP_TO and len(inputs.space.schedules) == 1:
            return _EXHAUSTIVE
        return next((each for most, each in _UP_TO if inputs.world_size <= most), _BEYOND)


_EXHAUSTIVE = Effort(
    listed=250,
    costed=210,
    widened=210,
    finalists=120,
    computations=400_000,
    quick_orders=24,
    orders=24,
    levels=LEVELS,
    slacks=(0.0, 1.0),
    polished=60,
    level_steps=len(LEVELS),
    keeps_all=True,
    assignments=4,
    followed=12,
    tries=60,
    hopeless=1.2,
    tolerance=1.35,
    climb=50_000,
)
_UP_TO_256 = Effort(
    listed=250,
    costed=24,
    widened=8,
    finalists=24,
    computations=70_000,
    finalists_part=0.4,
    refits=0,
    polished=4,
    climb=200_000,
)
_UP_TO = (  # GPUs
    (
        16,
        Effort(
            listed=250,
            costed=60,
            widened=8,
            finalists=40,
            computations=60_000,
            levels=(1, 2, 4),
            hopeless=1.15,
        ),
    ),
    (32, Effort(listed=250, costed=40, widened=14, finalists=30, computations=150_000)),
    (64, replace(_UP_TO_256, climb=600_000)),
    (256, _UP_TO_256),
    (
        2048,
        Effort(
            listed=200,
            costed=20,
            widened=5,
            finalists=4,
            computations=120_000,
            polished=2,
            climb=1,  # one plan, in one order
        ),
    ),
)
_BEYOND = Effort(
    listed=60, costed=8, widened=3, finalists=2, computations=400_000, polished=1, climb=1
)
