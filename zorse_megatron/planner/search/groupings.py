"""The groupings that the search considers, most promising first."""

from collections.abc import Iterable, Iterator

from zorse_megatron.planner.closed_form.balance import balanced_layers
from zorse_megatron.planner.closed_form.device_groups import DeviceGroup, DeviceGroups
from zorse_megatron.planner.closed_form.estimator import Estimator
from zorse_megatron.planner.groupings.grouping import Grouping, normalised
from zorse_megatron.planner.groupings.neighbours import neighbours
from zorse_megatron.planner.groupings.proposals import GroupingProposal, propose_groupings
from zorse_megatron.planner.groupings.set_partitions import set_partitions
from zorse_megatron.planner.groupings.symmetry import Symmetry

# Every partition is looked at up to this many GPUs (203 of them, fewer without mirror images).
EVERY_PARTITION_UP_TO = 6
# What each further group adds to the score: it takes a little longer to fill the pipeline.
_PER_GROUP = 0.002


class Groupings:
    """Lists groupings with scores."""

    def __init__(self, estimator: Estimator, device_groups: DeviceGroups) -> None:
        self.inputs = estimator.inputs
        self.estimator = estimator
        self.device_groups = device_groups
        self.symmetry = Symmetry(self.inputs.spec)
        self.seen: set[int] = set()
        kinds = dict.fromkeys(self.inputs.kinds)
        self.speeds = {kind: 1 / sum(estimator.cost_model.layer_s(kind, 1)) for kind in kinds}
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
        members = [self.device_groups.of(group) for group in grouping]
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
