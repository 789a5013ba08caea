"""The groupings that the search considers, most promising first."""

from collections.abc import Iterable, Iterator

from zorse_megatron.planner.closed_form.balance import deal
from zorse_megatron.planner.closed_form.device_groups import Team, Teams
from zorse_megatron.planner.closed_form.estimator import Estimator
from zorse_megatron.planner.groupings.candidates import Candidate, candidates
from zorse_megatron.planner.groupings.grouping import Grouping, normalised
from zorse_megatron.planner.groupings.neighbours import neighbours
from zorse_megatron.planner.groupings.symmetry import Symmetry

# Every partition is looked at up to so many GPUs (203 of them, fewer without mirror images).
EVERY_PARTITION_UP_TO = 6
# What each further group adds to the score: it takes a little longer to fill the pipeline.
_PER_GROUP = 0.002


class Groupings:
    """Lists groupings with scores."""

    def __init__(self, estimator: Estimator, teams: Teams) -> None:
        self.inputs = estimator.inputs
        self.estimator = estimator
        self.teams = teams
        self.symmetry = Symmetry(self.inputs.spec)
        self.seen: set[int] = set()
        kinds = dict.fromkeys(self.inputs.kinds)
        self.speeds = {kind: 1 / sum(estimator.stages.layer_s(kind, 1)) for kind in kinds}
        most = self.inputs.space.max_groups or self.inputs.num_layers
        self.most = min(most, self.inputs.num_layers, self.inputs.world_size)

    def start(self, limit: int) -> list[tuple[float, Candidate]]:
        """Up to `limit` candidates with scores, best first."""
        listed: Iterator[Candidate] = candidates(
            self.inputs.spec, max_groups=self.most, limit=limit, speeds=self.speeds
        )
        if self.inputs.world_size <= EVERY_PARTITION_UP_TO:
            listed = self._every_partition()
        return self._scored(listed)

    def around(self, grouping: Grouping, limit: int) -> list[tuple[float, Candidate]]:
        """New groupings one step from a given one, best first."""
        near = neighbours(self.inputs.spec, grouping, symmetry=self.symmetry, limit=limit)
        return self._scored(near)

    def _scored(self, found: Iterable[Candidate]) -> list[tuple[float, Candidate]]:
        rows = []
        for candidate in found:
            if not 0 < len(candidate.grouping) <= self.most:
                continue
            signature = self.symmetry.signature(candidate.grouping)
            if signature not in self.seen:
                self.seen.add(signature)
                rows.append((self.score(candidate.grouping), candidate))
        return sorted(rows, key=lambda row: (row[0], row[1].grouping))

    def score(self, grouping: Grouping) -> float:
        """Time of the slowest group over a perfect balance, and of the slowest last reduction."""
        members = [self.teams.of(group) for group in grouping]
        speeds = [self._speed(team) for team in members]
        layers, slowest = deal(self.inputs.num_layers, speeds)
        batch = self.inputs.global_batch_size
        even_s = batch * self.inputs.num_layers / sum(speeds)
        tail_s = self._tail_s(members, layers)
        return (batch * slowest + tail_s) / even_s + _PER_GROUP * len(grouping)

    def _tail_s(self, members: list[Team], layers: tuple[int, ...]) -> float:
        """Gradients reduced and parameters gathered, on NICs that spread groups share."""
        networks, memory = self.estimator.networks, self.inputs.memory
        found = 0.0
        for team, count, crowd in zip(members, layers, networks.crowding(members), strict=True):
            parameters = count * memory.layer_parameters()
            num_bytes = memory.gradient_bytes(parameters) + memory.parameter_bytes(parameters)
            found = max(found, crowd * networks.even_gather_s(team, num_bytes))
        return found

    def _speed(self, team: Team) -> float:
        return sum(len(cell.ranks) * self.speeds[cell.kind] for cell in team.cells)

    def _every_partition(self) -> Iterator[Candidate]:
        for groups in _partitions(tuple(range(self.inputs.world_size))):
            yield Candidate(grouping=normalised(groups), origin="every partition")


def _partitions(items: tuple[int, ...]) -> Iterator[list[tuple[int, ...]]]:
    if not items:
        yield []
        return
    first, rest = items[0], items[1:]
    for partition in _partitions(rest):
        yield [(first,), *partition]
        for index, group in enumerate(partition):
            yield [*partition[:index], (first, *group), *partition[index + 1 :]]
