"""How much is in flight in each group of a candidate, and where that puts the groups."""

import math
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

from zorse_megatron.planner.closed_form.candidate import Candidate
from zorse_megatron.planner.closed_form.communication import CommunicationCosts, TransferPath
from zorse_megatron.planner.closed_form.device_groups import DeviceGroup, round_samples_of
from zorse_megatron.planner.closed_form.stage import MicroBatchLevel, StagePosition
from zorse_megatron.planner.closed_form.stage_costs import StageCostModel
from zorse_megatron.planner.inputs.search_inputs import Inputs
from zorse_megatron.schedules.events import BACKWARD_COST

# From which part of a forward on the time of a message counts. On the paper's clusters 0.1, 0.25
# and 1 give iterations that differ by less than one in a thousand; with fewer of them the
# simulation is faster.
_COUNTS_FROM = 0.25


@dataclass(frozen=True, kw_only=True)
class SizedGroup:
    """A device group with its micro-batches."""

    device_group: DeviceGroup
    sizes: tuple[int, ...]
    """Micro-batch size of each GPU class."""
    round_samples: int
    """Samples of one micro-batch on every GPU."""


class HasMicroBatches(Protocol):
    """Anything with micro-batches: a sized group or a stage."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """As of a `SizedGroup`."""

    @property
    def round_samples(self) -> int:
        """As of a `SizedGroup`."""


class InFlight:
    """Micro-batch sizes, rounds and in-flight limits of candidates, each found once."""

    def __init__(
        self, inputs: Inputs, cost_model: StageCostModel, communication: CommunicationCosts
    ) -> None:
        self.inputs = inputs
        self.cost_model = cost_model
        self.communication = communication
        self._sized_groups: dict[tuple[DeviceGroup, MicroBatchLevel], SizedGroup] = {}
        self._extras: dict[object, tuple[int, ...]] = {}
        self._positions: dict[object, tuple[StagePosition, ...]] = {}

    def sized_groups(self, candidate: Candidate) -> list[SizedGroup]:
        """The device groups with their micro-batches."""
        return [
            self._sized_group(*row)
            for row in zip(candidate.device_groups, candidate.levels, strict=True)
        ]

    def _sized_group(self, device_group: DeviceGroup, level: MicroBatchLevel) -> SizedGroup:
        key = (device_group, level)
        if key not in self._sized_groups:
            sizes = self.cost_model.sizes(device_group, level)
            samples = round_samples_of(device_group, sizes)
            self._sized_groups[key] = SizedGroup(
                device_group=device_group, sizes=sizes, round_samples=samples
            )
        return self._sized_groups[key]

    def speed(self, device_group: DeviceGroup, level: MicroBatchLevel) -> float:
        """Layers of one sample per second, forward and backward."""
        sizes = self._sized_group(device_group, level).sizes
        return sum(
            len(gpu_class.ranks) * size / sum(self.cost_model.layer_s(gpu_class.kind, size))
            for gpu_class, size in zip(device_group.gpu_classes, sizes, strict=True)
        )

    def differs(self, candidate: Candidate) -> bool:
        """Whether the groups have rounds of different sizes."""
        return len({sized.round_samples for sized in self.sized_groups(candidate)}) > 1

    def positions(self, candidate: Candidate) -> tuple[StagePosition, ...]:
        """Where the device groups stand in the pipeline, with their in-flight limits."""
        key = (
            candidate.device_groups,
            candidate.levels,
            candidate.schedule,
            candidate.num_chunks,
            candidate.slack,
        )
        if key not in self._positions:
            last = len(candidate.device_groups) - 1
            slow = self._slow_transfers(candidate)
            self._positions[key] = tuple(
                StagePosition(
                    is_first=index == 0,
                    is_last=index == last,
                    in_flight_limit=in_flight_limit,
                    schedule=candidate.schedule,
                    num_chunks=candidate.num_chunks,
                    slow_before=slow[index - 1],
                    slow_after=slow[index],
                )
                for index, in_flight_limit in enumerate(self._in_flight_limits(candidate))
            )
        return self._positions[key]

    def _slow_transfers(self, candidate: Candidate) -> list[bool]:
        """For each group, whether the plan says how long messages to the next one are on their way.

        It does where one takes longer than a small part of the shorter forward of the two, if all
        GPUs are equally busy; not under breadth_first, whose order does not depend on it.
        """
        sized_groups, number = self.sized_groups(candidate), len(candidate.device_groups)
        found = [False] * number
        if candidate.schedule == "breadth_first" or number < 2:
            return found
        speed = sum(map(self.speed, candidate.device_groups, candidate.levels))
        per_sample_s = self.inputs.num_layers / speed / candidate.num_chunks
        for at in range(number if candidate.num_chunks > 1 else number - 1):
            here, after = sized_groups[at], sized_groups[(at + 1) % number]
            path = self.communication.path(here.device_group, after.device_group)
            samples = min(here.round_samples, after.round_samples)
            forward_s = samples * per_sample_s / (1 + BACKWARD_COST)
            found[at] = self.message_s(here, after, path) > _COUNTS_FROM * forward_s
        return found

    def _in_flight_limits(self, candidate: Candidate) -> list[float]:
        if candidate.schedule == "breadth_first":
            return [0.0] * len(candidate.device_groups)
        rounds = [sized.round_samples for sized in self.sized_groups(candidate)]
        from_here = list(accumulate(reversed(rounds)))[::-1]
        rows = list(zip(from_here, self.extras(candidate), rounds, strict=True))
        if candidate.schedule == "interleaved":
            before = (candidate.num_chunks - 1) * sum(rounds)
            return [
                float(before + 2 * (in_flight_limit + extra) - own)
                for in_flight_limit, extra, own in rows
            ]
        return [float(in_flight_limit + extra) for in_flight_limit, extra, _ in rows]

    def extras(self, candidate: Candidate) -> tuple[int, ...]:
        """Samples in flight under 1f1b beyond one round of each group from here on.

        A group has what the next one has, a round of its own, and what is on the way to the next
        one and back at the rate of all GPUs together; in whole rounds.
        """
        if candidate.schedule != "1f1b" or not candidate.slack or len(candidate.device_groups) < 2:
            return (0,) * len(candidate.device_groups)
        key = (candidate.device_groups, candidate.levels, candidate.slack)
        if key not in self._extras:
            self._extras[key] = tuple(self._find_extras(candidate))
        return self._extras[key]

    def _find_extras(self, candidate: Candidate) -> list[int]:
        sized_groups = self.sized_groups(candidate)
        speed = sum(map(self.speed, candidate.device_groups, candidate.levels))
        per_s = candidate.slack * speed / self.inputs.num_layers
        in_flight_limit, from_here, found = (
            sized_groups[-1].round_samples,
            sized_groups[-1].round_samples,
            [0],
        )
        for at in range(len(sized_groups) - 2, -1, -1):
            here, after = sized_groups[at], sized_groups[at + 1]
            path = self.communication.path(here.device_group, after.device_group)
            needed = (
                in_flight_limit + here.round_samples + 2 * per_s * self.message_s(here, after, path)
            )
            if not _nested(here, after):  # micro-batches wait for parts of others
                needed += candidate.slack * max(here.round_samples, after.round_samples)
            # Limits are whole micro-batches of each replica.
            in_flight_limit = math.ceil(needed / here.round_samples - 1e-9) * here.round_samples
            from_here += here.round_samples
            found.append(max(0, in_flight_limit - from_here))
        return found[::-1]

    def message_s(
        self, sender: HasMicroBatches, receiver: HasMicroBatches, path: TransferPath
    ) -> float:
        """One message; groups in step send all of a round's at once."""
        in_step = sender.round_samples == receiver.round_samples
        in_step = in_step and set(sender.sizes) == set(receiver.sizes)
        size = min(max(sender.sizes), max(receiver.sizes))
        at_once = sender.round_samples if in_step else 0
        return self.communication.transfer_s(path, size=size, round_samples=at_once)


def _nested(here: SizedGroup, after: SizedGroup) -> bool:
    """Whether rounds of two neighbours consist of each other's, of equal micro-batches."""
    rounds = here.round_samples, after.round_samples
    return len({*here.sizes, *after.sizes}) == 1 and max(rounds) % min(rounds) == 0
