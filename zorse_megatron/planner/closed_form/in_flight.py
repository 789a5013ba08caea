"""How much is in flight in each group of an outline, and where that puts the groups."""

import math
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

from zorse_megatron.planner.closed_form.candidate import Outline
from zorse_megatron.planner.closed_form.communication import Hop, Networks
from zorse_megatron.planner.closed_form.device_groups import Team, round_of
from zorse_megatron.planner.closed_form.stage import Level, Place
from zorse_megatron.planner.closed_form.stage_costs import Stages
from zorse_megatron.planner.inputs.search_inputs import Inputs
from zorse_megatron.schedules.events import BACKWARD_COST

# From which part of a forward on the time of a message counts. On the paper's clusters 0.1, 0.25
# and 1 give iterations that differ by less than one in a thousand; with fewer hops the play is
# faster.
_COUNTS_FROM = 0.25


@dataclass(frozen=True, kw_only=True)
class Lane:
    """A team with its micro-batches."""

    team: Team
    sizes: tuple[int, ...]
    """Micro-batch size of each cell."""
    round_samples: int
    """Samples of one micro-batch on every GPU."""


class Rounds(Protocol):
    """Anything with micro-batches: a lane or a job."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """As of a `Lane`."""

    @property
    def round_samples(self) -> int:
        """As of a `Lane`."""


class Flight:
    """Micro-batch sizes, rounds and windows of outlines, each found once."""

    def __init__(self, inputs: Inputs, stages: Stages, networks: Networks) -> None:
        self.inputs = inputs
        self.stages = stages
        self.networks = networks
        self._lanes: dict[tuple[Team, Level], Lane] = {}
        self._extras: dict[object, tuple[int, ...]] = {}
        self._places: dict[object, tuple[Place, ...]] = {}

    def lanes(self, outline: Outline) -> list[Lane]:
        """The teams with their micro-batches."""
        return [self._lane(*row) for row in zip(outline.teams, outline.levels, strict=True)]

    def _lane(self, team: Team, level: Level) -> Lane:
        key = (team, level)
        if key not in self._lanes:
            sizes = self.stages.sizes(team, level)
            samples = round_of(team, sizes)
            self._lanes[key] = Lane(team=team, sizes=sizes, round_samples=samples)
        return self._lanes[key]

    def speed(self, team: Team, level: Level) -> float:
        """Layers of one sample per second, forward and backward."""
        sizes = self._lane(team, level).sizes
        return sum(
            len(cell.ranks) * size / sum(self.stages.layer_s(cell.kind, size))
            for cell, size in zip(team.cells, sizes, strict=True)
        )

    def differs(self, outline: Outline) -> bool:
        """Whether the groups have rounds of different sizes."""
        return len({lane.round_samples for lane in self.lanes(outline)}) > 1

    def places(self, outline: Outline) -> tuple[Place, ...]:
        """Where the teams stand in the pipeline, with their windows."""
        key = (
            outline.teams,
            outline.levels,
            outline.schedule,
            outline.num_chunks,
            outline.slack,
        )
        if key not in self._places:
            last = len(outline.teams) - 1
            slow = self._slow_hops(outline)
            self._places[key] = tuple(
                Place(
                    is_first=index == 0,
                    is_last=index == last,
                    window=window,
                    schedule=outline.schedule,
                    num_chunks=outline.num_chunks,
                    slow_before=slow[index - 1],
                    slow_behind=slow[index],
                )
                for index, window in enumerate(self._windows(outline))
            )
        return self._places[key]

    def _slow_hops(self, outline: Outline) -> list[bool]:
        """For each group, whether the plan says how long messages to the next one are on their way.

        It does where one takes longer than a small part of the shorter forward of the two, if all
        GPUs are equally busy; not under breadth_first, whose order does not depend on it.
        """
        lanes, number = self.lanes(outline), len(outline.teams)
        found = [False] * number
        if outline.schedule == "breadth_first" or number < 2:
            return found
        speed = sum(map(self.speed, outline.teams, outline.levels))
        per_sample_s = self.inputs.num_layers / speed / outline.num_chunks
        for at in range(number if outline.num_chunks > 1 else number - 1):
            here, after = lanes[at], lanes[(at + 1) % number]
            hop = self.networks.hop(here.team, after.team)
            samples = min(here.round_samples, after.round_samples)
            forward_s = samples * per_sample_s / (1 + BACKWARD_COST)
            found[at] = self.message_s(here, after, hop) > _COUNTS_FROM * forward_s
        return found

    def _windows(self, outline: Outline) -> list[float]:
        if outline.schedule == "breadth_first":
            return [0.0] * len(outline.teams)
        rounds = [lane.round_samples for lane in self.lanes(outline)]
        behind = list(accumulate(reversed(rounds)))[::-1]
        rows = list(zip(behind, self.extras(outline), rounds, strict=True))
        if outline.schedule == "interleaved":
            before = (outline.num_chunks - 1) * sum(rounds)
            return [float(before + 2 * (window + extra) - own) for window, extra, own in rows]
        return [float(window + extra) for window, extra, _ in rows]

    def extras(self, outline: Outline) -> tuple[int, ...]:
        """Samples in flight under 1f1b beyond one round of each group from here on.

        A group has what the next one has, a round of its own, and what is on the way to the next
        one and back at the rate of all GPUs together; in whole rounds.
        """
        if outline.schedule != "1f1b" or not outline.slack or len(outline.teams) < 2:
            return (0,) * len(outline.teams)
        key = (outline.teams, outline.levels, outline.slack)
        if key not in self._extras:
            self._extras[key] = tuple(self._find_extras(outline))
        return self._extras[key]

    def _find_extras(self, outline: Outline) -> list[int]:
        lanes = self.lanes(outline)
        speed = sum(map(self.speed, outline.teams, outline.levels))
        per_s = outline.slack * speed / self.inputs.num_layers
        window, behind, found = lanes[-1].round_samples, lanes[-1].round_samples, [0]
        for at in range(len(lanes) - 2, -1, -1):
            here, after = lanes[at], lanes[at + 1]
            hop = self.networks.hop(here.team, after.team)
            needed = window + here.round_samples + 2 * per_s * self.message_s(here, after, hop)
            if not _nested(here, after):  # micro-batches wait for parts of others
                needed += outline.slack * max(here.round_samples, after.round_samples)
            # Limits are whole micro-batches of each replica.
            window = math.ceil(needed / here.round_samples - 1e-9) * here.round_samples
            behind += here.round_samples
            found.append(max(0, window - behind))
        return found[::-1]

    def message_s(self, sender: Rounds, receiver: Rounds, hop: Hop) -> float:
        """One message; groups in step send all of a round's at once."""
        in_step = sender.round_samples == receiver.round_samples
        in_step = in_step and set(sender.sizes) == set(receiver.sizes)
        size = min(max(sender.sizes), max(receiver.sizes))
        crowd = sender.round_samples if in_step else 0
        return self.networks.hop_s(hop, size=size, round_samples=crowd)


def _nested(here: Lane, after: Lane) -> bool:
    """Whether rounds of two neighbours consist of each other's, of equal micro-batches."""
    rounds = here.round_samples, after.round_samples
    return len({*here.sizes, *after.sizes}) == 1 and max(rounds) % min(rounds) == 0
