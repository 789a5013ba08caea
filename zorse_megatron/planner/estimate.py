"""How long an iteration of a plan takes, in closed form, and the best layers for its groups.

1f1b, with groups j = 0, 1, ... in model order: busy_j of the slowest replica, passage_j of one
micro-batch (forward and backward), hop_j to the next group, and the window W_j of samples that
`schedules.one_f_one_b` lets group j have in flight, extra ones for time on the way included:

    iteration = max(busy_j, loop_j, busiest link) + passages and hops of all but the slowest + tail
    loop_j = batch / W_j * (passages and both ways of hops from j on)
           or batch / (W_j - W_k + round_k) * (passages of j and k = j + 1, both ways of the hop)

The loop is what makes unequal or slow hops felt: a window holds exactly the samples of one round
of each later group, so whatever time samples spend on the way is not covered. The tail is the last
reduction, the sums over all ranks, the optimizer step and the gathers.

breadth_first: no windows; collectives hide behind computation but for the first gather and the
last reduction, and filling takes one chunk of each group.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from zorse_megatron.planner.balance import deal
from zorse_megatron.planner.inputs import Inputs
from zorse_megatron.planner.layers import Price, best_layouts
from zorse_megatron.planner.network import Hop, Networks
from zorse_megatron.planner.stage import Job, Level, Place, StagePrice, Stages
from zorse_megatron.planner.teams import Team

# Numbers of layers that are priced for a group: those that balance speeds, and so many around, in
# all and as a part of them.
_AROUND, _AROUND_PART = 1, 0.2
# How much of a passage a micro-batch waits for the others of its round where the rounds of two
# groups differ, so that they cannot work in step: fitted to simulations of unequal groups.
_OUT_OF_STEP = 0.4
# A message shares the NICs with the gathers and reductions of groups on several nodes, which run
# nearly all the time under breadth_first: it gets half.
_BESIDE_COLLECTIVES = 2.0


@dataclass(frozen=True, kw_only=True)
class Outline:
    """A plan but for its layers: groups in model order, micro-batch levels, schedule."""

    teams: tuple[Team, ...]
    levels: tuple[Level, ...]
    """Micro-batch sizes of each group."""
    schedule: str = "1f1b"
    num_chunks: int = 1
    """Of each group."""
    reserves: tuple[int, ...] = ()
    """Bytes to be left free on the GPUs of each group; empty: none."""
    origin: str = ""
    slack: float = 1.0
    """1f1b: how much of the time that samples wait and travel is made up for by more in flight."""

    def with_level(self, group: int, level: Level) -> "Outline":
        """Another level for one group."""
        levels = (*self.levels[:group], level, *self.levels[group + 1 :])
        return replace(self, levels=levels)


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """An outline with layers, and its price."""

    outline: Outline
    layers: tuple[int, ...]
    jobs: tuple[Job, ...]
    stages: tuple[StagePrice, ...]
    extras: tuple[int, ...]
    """Samples in flight of each group beyond those of 1f1b."""
    iteration_s: float
    busy_s: float
    loop_s: float
    link_s: float
    fill_s: float
    tail_s: float


class Estimator:
    """Prices outlines."""

    def __init__(self, inputs: Inputs) -> None:
        self.inputs = inputs
        self.stages = Stages(inputs)
        self.networks = Networks(inputs)
        self.num_estimated = 0
        self._extras: dict[object, tuple[int, ...]] = {}

    def best(self, outline: Outline, *, most: int = 1) -> list[Estimate]:
        """Estimates with the best layers, best first; empty where nothing fits."""
        num_groups = len(outline.teams)
        if num_groups > self.inputs.num_layers:
            return []
        if outline.schedule == "interleaved" and outline.num_chunks > 1 and self._differ(outline):
            return []  # groups that are out of step in every turn: never worth it
        found: list[Estimate] = []
        chunks = outline.num_chunks
        if chunks > 1 and self.inputs.num_layers % chunks == 0:
            found += self._best(outline, most=most, step=chunks)
        found += self._best(outline, most=most, step=1)
        return sorted(found, key=lambda each: (each.iteration_s, each.layers))[:most]

    def _best(self, outline: Outline, *, most: int, step: int) -> list[Estimate]:
        """As `best`, with numbers of layers that are multiples of a step: equal chunks."""
        for center in self._centers(outline):
            jobs = self._jobs(outline, center, step)
            tables = [
                {
                    layers: Price(
                        busy_s=price.busy_s,
                        passage_s=(price.forward_s + price.backward_s) / job.num_chunks,
                    )
                    for layers, job in by_layers.items()
                    if (price := self.stages.price(job)) is not None
                }
                for by_layers in jobs
            ]
            layouts = best_layouts(tables, self.inputs.num_layers, most=most)
            if layouts:
                found = [self.estimate(outline, layout.layers) for layout in layouts]
                return [each for each in found if each is not None]
        return []

    def _centers(self, outline: Outline) -> Iterator[tuple[int, ...]]:
        """Layers of each group to look around: balanced; then balanced as far as they fit."""
        speeds = [
            self.speed(team, level)
            for team, level in zip(outline.teams, outline.levels, strict=True)
        ]
        num_layers = self.inputs.num_layers
        yield deal(num_layers, speeds)[0]
        most = [self._most_layers(outline, index) for index in range(len(outline.teams))]
        layers, slowest = deal(num_layers, speeds, most)
        if slowest < math.inf:
            yield layers

    def _most_layers(self, outline: Outline, index: int) -> int:
        """The most that a group can hold, by bisection."""
        places, sizes = self._places(outline)
        reserve = outline.reserves[index] if outline.reserves else 0
        low, high = 0, self.inputs.num_layers - len(outline.teams) + 1
        while low < high:
            middle = (low + high + 1) // 2
            job = Job(outline.teams[index], middle, sizes[index], places[index], reserve)
            if self.stages.price(job) is None:
                high = middle - 1
            else:
                low = middle
        return low

    def estimate(self, outline: Outline, layers: Sequence[int]) -> Estimate | None:
        """The price of an outline with these layers; None where it does not fit."""
        self.num_estimated += 1
        places, sizes = self._places(outline)
        reserves = outline.reserves or (0,) * len(outline.teams)
        jobs = tuple(
            Job(team, count, size, place, reserve)
            for team, count, size, place, reserve in zip(
                outline.teams, layers, sizes, places, reserves, strict=True
            )
        )
        prices = [self.stages.price(job) for job in jobs]
        found = tuple(price for price in prices if price is not None)
        if len(found) < len(prices):
            return None
        hops = self._hops(outline)
        if outline.schedule == "breadth_first":
            return self._breadth_first(outline, jobs, found, hops)
        return self._one_f_one_b(outline, jobs, found, hops)

    def _places(self, outline: Outline) -> tuple[list[Place], list[tuple[int, ...]]]:
        teams = outline.teams
        sizes = [
            self.stages.sizes(team, level)
            for team, level in zip(teams, outline.levels, strict=True)
        ]
        rounds = [round_of(team, row) for team, row in zip(teams, sizes, strict=True)]
        windows = [
            float(window + extra)
            for window, extra in zip(
                list(accumulate(reversed(rounds)))[::-1], self.extras(outline), strict=True
            )
        ]
        if outline.schedule == "interleaved":
            before = (outline.num_chunks - 1) * sum(rounds)
            windows = [
                before + 2 * window - own for window, own in zip(windows, rounds, strict=True)
            ]
        last = len(teams) - 1
        places = [
            Place(
                is_first=index == 0,
                is_last=index == last,
                window=0.0 if outline.schedule == "breadth_first" else window,
                schedule=outline.schedule,
                num_chunks=outline.num_chunks,
            )
            for index, window in enumerate(windows)
        ]
        return places, sizes

    def extras(self, outline: Outline) -> tuple[int, ...]:
        """Samples in flight under 1f1b beyond one round of each group from here on.

        A group has what the next one has, a round of its own, and what is on the way to the next
        one and back at the rate of all GPUs together; in whole rounds.
        """
        none = (0,) * len(outline.teams)
        if outline.schedule != "1f1b" or not outline.slack or len(outline.teams) < 2:
            return none
        key = (outline.teams, outline.levels, outline.slack)
        if key not in self._extras:
            rounds, largest, speed = [], [], 0.0
            for team, level in zip(outline.teams, outline.levels, strict=True):
                sizes = self.stages.sizes(team, level)
                rounds.append(round_of(team, sizes))
                largest.append(max(sizes))
                speed += self.speed(team, level)
            per_s = outline.slack * speed / self.inputs.num_layers
            window, found = rounds[-1], [0]
            for at in range(len(rounds) - 2, -1, -1):
                hop = self.networks.hop(outline.teams[at], outline.teams[at + 1])
                in_step = rounds[at] == rounds[at + 1] and largest[at] == largest[at + 1]
                size = min(largest[at], largest[at + 1])
                crowd = rounds[at] if in_step else 0
                needed = float(window + rounds[at])
                needed += 2 * per_s * self.networks.hop_s(hop, size=size, round_samples=crowd)
                if not self._nested(outline, at):  # micro-batches wait for parts of others
                    needed += outline.slack * max(rounds[at], rounds[at + 1])
                # Limits are whole micro-batches of each replica.
                window = math.ceil(needed / rounds[at] - 1e-9) * rounds[at]
                found.append(max(0, window - sum(rounds[at:])))
            self._extras[key] = tuple(reversed(found))
        return self._extras[key]

    def _nested(self, outline: Outline, at: int) -> bool:
        """Whether rounds of two neighbours consist of each other's, of equal micro-batches."""
        first, second = (
            self.stages.sizes(outline.teams[each], outline.levels[each]) for each in (at, at + 1)
        )
        rounds = [
            round_of(outline.teams[at], first),
            round_of(outline.teams[at + 1], second),
        ]
        return len({*first, *second}) == 1 and max(rounds) % min(rounds) == 0

    def _jobs(self, outline: Outline, center: Sequence[int], step: int) -> list[dict[int, Job]]:
        """For each group the numbers of layers around the center, multiples of a step."""
        places, sizes = self._places(outline)
        most = self.inputs.num_layers - len(outline.teams) + 1
        reserves = outline.reserves or (0,) * len(outline.teams)
        result = []
        for index, team in enumerate(outline.teams):
            around = max(step, _AROUND + int(_AROUND_PART * center[index] + 0.5))
            low, high = max(1, center[index] - around), min(most, center[index] + around)
            result.append(
                {
                    layers: Job(team, layers, sizes[index], places[index], reserves[index])
                    for layers in range(low, high + 1)
                    if layers % step == 0
                }
            )
        return result

    def speed(self, team: Team, level: Level) -> float:
        """Layers of one sample per second, forward and backward."""
        sizes = self.stages.sizes(team, level)
        return sum(
            len(cell.ranks) * size / sum(self.stages.layer_s(cell.kind, size))
            for cell, size in zip(team.cells, sizes, strict=True)
        )

    def _hops(self, outline: Outline) -> list[Hop]:
        hops = [self.networks.hop(a, b) for a, b in pairwise(outline.teams)]
        if outline.num_chunks > 1 and len(outline.teams) > 1:
            hops.append(self.networks.hop(outline.teams[-1], outline.teams[0]))
        return hops

    def _hop_times(self, jobs: Sequence[Job], hops: Sequence[Hop]) -> list[float]:
        times = []
        for job, hop in zip(jobs, hops, strict=False):
            samples = sum(
                len(cell.ranks) * size for cell, size in zip(job.team.cells, job.sizes, strict=True)
            )
            size = max(job.sizes)
            times.append(self.networks.hop_s(hop, size=size, round_samples=samples))
        return times

    def _one_f_one_b(
        self,
        outline: Outline,
        jobs: tuple[Job, ...],
        stages: tuple[StagePrice, ...],
        hops: Sequence[Hop],
    ) -> Estimate:
        batch = self.inputs.global_batch_size
        hop_s = self._hop_times(jobs, hops)
        hop_s += [0.0] * (len(jobs) - len(hop_s))
        stalls = self._stalls(jobs, stages, hops)
        busy_s = max(stage.busy_s + stall for stage, stall in zip(stages, stalls, strict=True))
        chunks = outline.num_chunks
        waits = self._waits(jobs, stages)
        around_s = (
            sum(waits) + sum(stage.mean_passage_s for stage in stages) + 2 * chunks * sum(hop_s)
        )
        loops, way_s = [], around_s * (chunks - 1) / 2
        rows = list(zip(jobs, stages, hop_s, waits, strict=True))
        for job, stage, its_hop_s, wait_s in reversed(rows):
            way_s += stage.mean_passage_s + 2 * its_hop_s + wait_s  # of one chunk and all before
            loops.append(batch / self._window(job) * way_s)
        if chunks == 1:
            loops += self._pair_loops(jobs, stages, hop_s)
        link_s = self.networks.busiest_link_s(hops) * chunks
        passages = [
            (stage.forward_s + stage.backward_s) / job.num_chunks
            for stage, job in zip(stages, jobs, strict=True)
        ]
        slowest = max(range(len(stages)), key=lambda index: stages[index].busy_s)
        fill_s = sum(passages) - passages[slowest] + 2 * sum(hop_s)
        tail_s = self._tail(outline, jobs, stages)
        steady_s = max(busy_s, *loops, link_s)
        return Estimate(
            outline=outline,
            layers=tuple(job.num_layers for job in jobs),
            jobs=jobs,
            stages=stages,
            extras=self.extras(outline),
            iteration_s=steady_s + fill_s + tail_s,
            busy_s=busy_s,
            loop_s=max(loops),
            link_s=link_s,
            fill_s=fill_s,
            tail_s=tail_s,
        )

    def _pair_loops(
        self, jobs: Sequence[Job], stages: Sequence[StagePrice], hop_s: Sequence[float]
    ) -> list[float]:
        """For each hop how long the batch takes if both ends always have all in flight they may.

        What only the first has in flight, and one round of the second, goes around between them:
        through a forward and a backward of both, and the hop both ways.
        """
        windows = [self._window(job) for job in jobs]
        found = []
        for at, (first, second) in enumerate(pairwise(stages)):
            own = round_of(jobs[at + 1].team, jobs[at + 1].sizes)
            around = max(own, windows[at] - windows[at + 1] + own)
            way_s = first.mean_passage_s + second.mean_passage_s + 2 * hop_s[at]
            found.append(self.inputs.global_batch_size / around * way_s)
        return found

    def _differ(self, outline: Outline) -> bool:
        """Whether the groups have rounds of different sizes."""
        rows = zip(outline.teams, outline.levels, strict=True)
        return len({round_of(team, self.stages.sizes(team, level)) for team, level in rows}) > 1

    def _stalls(
        self, jobs: Sequence[Job], stages: Sequence[StagePrice], hops: Sequence[Hop]
    ) -> list[float]:
        """For each group, how long it stops in all for messages that take longer than it hides.

        A receive is started two computations early, so a message hides behind those only: in
        1f1b behind a forward and a backward, in breadth_first behind two of its own kind. Groups
        in step send all at once.
        """
        found = [0.0] * len(jobs)
        for at, hop in enumerate(hops):
            source, target = at % len(jobs), (at + 1) % len(jobs)
            for sender, receiver, forward in ((source, target, True), (target, source, False)):
                job, stage = jobs[receiver], stages[receiver]
                message_s = self._message_s(jobs[sender], job, hop)
                own_kind = job.place.schedule == "breadth_first"
                if own_kind and any(
                    len(self.networks.nodes(jobs[at].team)) > 1 for at in (sender, receiver)
                ):
                    message_s *= _BESIDE_COLLECTIVES
                hidden_s = stage.forward_s + stage.backward_s
                if own_kind:
                    hidden_s = 2 * (stage.forward_s if forward else stage.backward_s)
                parts = job.num_chunks
                number = self.inputs.global_batch_size / round_of(job.team, job.sizes)
                found[receiver] += number * max(0.0, parts * message_s - hidden_s)
        return found

    def _message_s(self, sender: Job, receiver: Job, hop: Hop) -> float:
        rounds = [round_of(job.team, job.sizes) for job in (sender, receiver)]
        in_step = rounds[0] == rounds[1] and set(sender.sizes) == set(receiver.sizes)
        size = min(max(sender.sizes), max(receiver.sizes))
        crowd = rounds[0] if in_step else 0.0
        return self.networks.hop_s(hop, size=size, round_samples=crowd)

    def _waits(self, jobs: Sequence[Job], stages: Sequence[StagePrice]) -> list[float]:
        """What a sample waits at each group for being out of step with the next one."""
        rounds = [round_of(job.team, job.sizes) for job in jobs]
        waits = [
            _OUT_OF_STEP * (stages[at + 1].mean_passage_s if one != other else 0.0)
            for at, (one, other) in enumerate(pairwise(rounds))
        ]
        return [*waits, 0.0]

    def _window(self, job: Job) -> float:
        """Samples that the team may really have in flight: limits are rounded up."""
        counts = self.stages.counts(job)
        return sum(
            len(cell.ranks) * size * self.stages.limit(job.place, count)
            for cell, size, count in zip(job.team.cells, job.sizes, counts, strict=True)
        )

    def _tail(self, outline: Outline, jobs: Sequence[Job], stages: Sequence[StagePrice]) -> float:
        memory = self.inputs.memory
        crowding = self.networks.crowding(outline.teams)
        reduce_s, gather_s, step_s, ahead_s = 0.0, 0.0, 0.0, 0.0
        for job, stage, crowd in zip(jobs, stages, crowding, strict=True):
            parameters = self.stages.parameters(job.num_layers, job.place)
            mine_s = crowd * self.networks.even_gather_s(
                job.team, memory.gradient_bytes(parameters)
            )
            # A later group is done earlier, by the backwards of the groups before it.
            reduce_s = max(reduce_s, mine_s - ahead_s)
            ahead_s += stage.backward_s
            back_s = crowd * self.networks.even_gather_s(
                job.team, memory.parameter_bytes(parameters)
            )
            gather_s = max(gather_s, back_s)
            step_s = max(step_s, self.stages.step_s(job, stage.settings))
        return reduce_s + 2 * self.networks.statistic_s + step_s + gather_s

    @staticmethod
    def _turns_s(
        jobs: Sequence[Job], stages: Sequence[StagePrice], stalls: Sequence[float], chunks: int
    ) -> float:
        """Sum over turns of the slowest group's chunk: a turn cannot end before its slowest."""
        per_layer = [
            (stage.busy_s + stall) / stage.num_layers
            for stage, stall in zip(stages, stalls, strict=True)
        ]
        parts = [parts_of(job.num_layers, chunks, is_last=job.place.is_last) for job in jobs]
        return sum(
            max(row[turn] * time_s for row, time_s in zip(parts, per_layer, strict=True))
            for turn in range(chunks)
        )

    def _breadth_first(
        self,
        outline: Outline,
        jobs: tuple[Job, ...],
        stages: tuple[StagePrice, ...],
        hops: Sequence[Hop],
    ) -> Estimate:
        memory, chunks = self.inputs.memory, outline.num_chunks
        crowding = self.networks.crowding(outline.teams)
        collective_s, exposed_s, step_s = 0.0, 0.0, 0.0
        for job, stage, crowd in zip(jobs, stages, crowding, strict=True):
            parameters = self.stages.parameters(job.num_layers, job.place)
            parts = job.num_chunks
            part = -(-parameters // parts)
            gather_s = crowd * self.networks.even_gather_s(job.team, memory.parameter_bytes(part))
            reduce_s = crowd * self.networks.even_gather_s(job.team, memory.gradient_bytes(part))
            collective_s = max(collective_s, parts * (2 * gather_s + reduce_s))
            exposed_s = max(exposed_s, gather_s + reduce_s)
            step_s = max(step_s, self.stages.step_s(job, stage.settings))
        hop_s = self._hop_times(jobs, hops)
        busy_s = self._turns_s(jobs, stages, self._stalls(jobs, stages, hops), chunks)
        passages = [
            (stage.forward_s + stage.backward_s) / job.num_chunks
            for stage, job in zip(stages, jobs, strict=True)
        ]
        link_s = self.networks.busiest_link_s(hops) * chunks
        fill_s = sum(passages) - max(passages) + 2 * sum(hop_s)
        tail_s = exposed_s + 2 * self.networks.statistic_s + step_s
        return Estimate(
            outline=outline,
            layers=tuple(job.num_layers for job in jobs),
            jobs=jobs,
            stages=stages,
            extras=self.extras(outline),
            iteration_s=max(busy_s, collective_s, link_s) + fill_s + tail_s,
            busy_s=busy_s,
            loop_s=collective_s,
            link_s=link_s,
            fill_s=fill_s,
            tail_s=tail_s,
        )


def round_of(team: Team, sizes: Sequence[int]) -> int:
    """Samples of one micro-batch on every GPU of a team."""
    return sum(len(cell.ranks) * size for cell, size in zip(team.cells, sizes, strict=True))


def parts_of(num_layers: int, num_chunks: int, *, is_last: bool) -> tuple[int, ...]:
    """Layers of each of a group's chunks: as even as whole layers allow, larger ones first.

    All groups have their larger chunks in the same turns, because a turn takes as long as the
    slowest group's chunk. Groups with fewer layers than chunks are left out of the last turns, but
    the model's last group out of the first ones: it has the head.

    >>> parts_of(5, 2, is_last=False), parts_of(2, 3, is_last=False), parts_of(2, 3, is_last=True)
    ((3, 2), (1, 1, 0), (0, 1, 1))
    """
    least, larger = divmod(num_layers, num_chunks)
    parts = tuple(least + (turn < larger) for turn in range(num_chunks))
    return parts[::-1] if is_last and not least else parts
