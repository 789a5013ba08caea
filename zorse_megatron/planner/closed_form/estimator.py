"""Iteration time of a candidate in closed form, and the best layers for its groups.

1f1b, with groups j = 0, 1, ... in model order: busy_j of the slowest replica, passage_j of one
micro-batch (forward and backward; the mean over samples, because what fills and drains hardly ever
is what the slowest replica has), hop_j to the next group, and the window W_j of samples that
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
from dataclasses import dataclass
from itertools import pairwise

from zorse_megatron.planner.closed_form.balance import deal
from zorse_megatron.planner.closed_form.candidate import Estimate, Outline, parts_of
from zorse_megatron.planner.closed_form.communication import Hop, Networks
from zorse_megatron.planner.closed_form.device_groups import Team
from zorse_megatron.planner.closed_form.in_flight import Flight, Lane
from zorse_megatron.planner.closed_form.layer_assignment import Price, best_layouts
from zorse_megatron.planner.closed_form.stage import Job, Place
from zorse_megatron.planner.closed_form.stage_costs import StagePrice, Stages
from zorse_megatron.planner.inputs.search_inputs import Inputs

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
class _Row:
    """A group with its layers."""

    job: Job
    stage: StagePrice | None
    """None where it does not fit."""
    price: Price | None
    window: float
    """Samples that the team may really have in flight: limits are rounded up."""


class _Seat:
    """A group but for its layers; each number of them is priced once."""

    def __init__(self, stages: Stages, lane: Lane, place: Place, reserve_bytes: int) -> None:
        self.stages = stages
        self.lane = lane
        self.place = place
        self.reserve_bytes = reserve_bytes
        self._rows: dict[int, _Row] = {}

    def row(self, num_layers: int) -> _Row:
        found = self._rows.get(num_layers)
        if found is None:
            found = self._rows[num_layers] = self._find(num_layers)
        return found

    def _find(self, num_layers: int) -> _Row:
        lane, place = self.lane, self.place
        job = Job(lane.team, num_layers, lane.sizes, place, self.reserve_bytes)
        stage = self.stages.price(job)
        if stage is None:
            return _Row(job=job, stage=None, price=None, window=0.0)
        passage_s = stage.mean_passage_s / job.num_chunks
        price = Price(busy_s=stage.busy_s, passage_s=passage_s)
        return _Row(job=job, stage=stage, price=price, window=self._window(job))

    def _window(self, job: Job) -> float:
        if job.place.schedule == "breadth_first":
            return 0.0  # it has none
        counts = self.stages.counts(job)
        return sum(
            len(cell.ranks) * size * self.stages.memory.limit(job.place, count)
            for cell, size, count in zip(job.team.cells, job.sizes, counts, strict=True)
        )


class Estimator:
    """Costs candidates."""

    def __init__(self, inputs: Inputs) -> None:
        self.inputs = inputs
        self.stages = Stages(inputs)
        self.networks = Networks(inputs)
        self.flight = Flight(inputs, self.stages, self.networks)
        self.num_estimated = 0
        self._made: dict[tuple[Team, tuple[int, ...], Place, int], _Seat] = {}

    def best(self, outline: Outline, *, most: int = 1) -> list[Estimate]:
        """Estimates with the best layers, best first; empty where nothing fits."""
        num_groups = len(outline.teams)
        if num_groups > self.inputs.num_layers:
            return []
        if (
            outline.schedule == "interleaved"
            and outline.num_chunks > 1
            and self.flight.differs(outline)
        ):
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
            tables = self._tables(outline, center, step)
            layouts = best_layouts(tables, self.inputs.num_layers, most=most)
            if layouts:
                found = [self.estimate(outline, layout.layers) for layout in layouts]
                return [each for each in found if each is not None]
        return []

    def _centers(self, outline: Outline) -> Iterator[tuple[int, ...]]:
        """Layers of each group to look around: balanced; then balanced as far as they fit."""
        speeds = [
            self.flight.speed(team, level)
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
        seat = self._seats(outline)[index]
        low, high = 0, self.inputs.num_layers - len(outline.teams) + 1
        while low < high:
            middle = (low + high + 1) // 2
            if seat.row(middle).price is None:
                high = middle - 1
            else:
                low = middle
        return low

    def estimate(self, outline: Outline, layers: Sequence[int]) -> Estimate | None:
        """The price of an outline with these layers; None where it does not fit."""
        self.num_estimated += 1
        rows = [seat.row(count) for seat, count in zip(self._seats(outline), layers, strict=True)]
        found = tuple(row.stage for row in rows if row.stage is not None)
        if len(found) < len(rows):
            return None
        jobs = tuple(row.job for row in rows)
        hops = self._hops(outline)
        if outline.schedule == "breadth_first":
            return self._breadth_first(outline, jobs, found, hops)
        return self._one_f_one_b(outline, jobs, found, hops, [row.window for row in rows])

    def _tables(self, outline: Outline, center: Sequence[int], step: int) -> list[dict[int, Price]]:
        """For each group prices of the numbers of layers around the center, multiples of a step."""
        most = self.inputs.num_layers - len(outline.teams) + 1
        result = []
        for seat, middle in zip(self._seats(outline), center, strict=True):
            around = max(step, _AROUND + int(_AROUND_PART * middle + 0.5))
            low, high = max(1, middle - around), min(most, middle + around)
            prices = {n: seat.row(n).price for n in range(low, high + 1) if n % step == 0}
            result.append({n: price for n, price in prices.items() if price is not None})
        return result

    def _seats(self, outline: Outline) -> list[_Seat]:
        lanes, places = self.flight.lanes(outline), self.flight.places(outline)
        reserves = outline.reserves or (0,) * len(lanes)
        return [self._seat(*row) for row in zip(lanes, places, reserves, strict=True)]

    def _seat(self, lane: Lane, place: Place, reserve_bytes: int) -> _Seat:
        key = (lane.team, lane.sizes, place, reserve_bytes)
        found = self._made.get(key)
        if found is None:
            found = self._made[key] = _Seat(self.stages, lane, place, reserve_bytes)
        return found

    def _hops(self, outline: Outline) -> list[Hop]:
        hops = [self.networks.hop(a, b) for a, b in pairwise(outline.teams)]
        if outline.num_chunks > 1 and len(outline.teams) > 1:
            hops.append(self.networks.hop(outline.teams[-1], outline.teams[0]))
        return hops

    def _hop_times(self, jobs: Sequence[Job], hops: Sequence[Hop]) -> list[float]:
        times = []
        for job, hop in zip(jobs, hops, strict=False):
            size, samples = max(job.sizes), job.round_samples
            times.append(self.networks.hop_s(hop, size=size, round_samples=samples))
        return times

    def _one_f_one_b(
        self,
        outline: Outline,
        jobs: tuple[Job, ...],
        stages: tuple[StagePrice, ...],
        hops: Sequence[Hop],
        windows: Sequence[float],
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
        rows = list(zip(windows, stages, hop_s, waits, strict=True))
        for window, stage, its_hop_s, wait_s in reversed(rows):
            way_s += stage.mean_passage_s + 2 * its_hop_s + wait_s  # of one chunk and all before
            loops.append(batch / window * way_s)
        if chunks == 1:
            loops += self._pair_loops(jobs, stages, hop_s, windows)
        link_s = self.networks.busiest_link_s(hops) * chunks
        passages = [
            stage.mean_passage_s / job.num_chunks for stage, job in zip(stages, jobs, strict=True)
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
            extras=self.flight.extras(outline),
            iteration_s=steady_s + fill_s + tail_s,
            busy_s=busy_s,
            loop_s=max(loops),
            link_s=link_s,
            fill_s=fill_s,
            tail_s=tail_s,
        )

    def _pair_loops(
        self,
        jobs: Sequence[Job],
        stages: Sequence[StagePrice],
        hop_s: Sequence[float],
        windows: Sequence[float],
    ) -> list[float]:
        """For each hop how long the batch takes if both ends always have all in flight they may.

        What only the first has in flight, and one round of the second, goes around between them:
        through a forward and a backward of both, and the hop both ways.
        """
        found = []
        for at, (first, second) in enumerate(pairwise(stages)):
            own = jobs[at + 1].round_samples
            around = max(own, windows[at] - windows[at + 1] + own)
            way_s = first.mean_passage_s + second.mean_passage_s + 2 * hop_s[at]
            found.append(self.inputs.global_batch_size / around * way_s)
        return found

    def _stalls(
        self, jobs: Sequence[Job], stages: Sequence[StagePrice], hops: Sequence[Hop]
    ) -> list[float]:
        """For each group, how long it stops in all for messages that take longer than it hides.

        A receive is started two computations early, so a message hides behind those only: in
        1f1b behind a forward and a backward, in breadth_first behind two of its own kind. Groups
        in step send all at once. Where the plan says how long a hop is, nobody stops for it: the
        order has something else to do, as far as windows and links allow.
        """
        found = [0.0] * len(jobs)
        for at, hop in enumerate(hops):
            source, target = at % len(jobs), (at + 1) % len(jobs)
            for sender, receiver, forward in ((source, target, True), (target, source, False)):
                job, stage = jobs[receiver], stages[receiver]
                if job.place.slow_before if forward else job.place.slow_behind:
                    continue
                message_s = self.flight.message_s(jobs[sender], job, hop)
                own_kind = job.place.schedule == "breadth_first"
                if own_kind and any(
                    len(self.networks.nodes(jobs[at].team)) > 1 for at in (sender, receiver)
                ):
                    message_s *= _BESIDE_COLLECTIVES
                hidden_s = stage.forward_s + stage.backward_s
                if own_kind:
                    hidden_s = 2 * (stage.forward_s if forward else stage.backward_s)
                parts = job.num_chunks
                number = self.inputs.global_batch_size / job.round_samples
                found[receiver] += number * max(0.0, parts * message_s - hidden_s)
        return found

    def _waits(self, jobs: Sequence[Job], stages: Sequence[StagePrice]) -> list[float]:
        """What a sample waits at each group for being out of step with the next one."""
        rounds = [job.round_samples for job in jobs]
        waits = [
            _OUT_OF_STEP * (stages[at + 1].mean_passage_s if one != other else 0.0)
            for at, (one, other) in enumerate(pairwise(rounds))
        ]
        return [*waits, 0.0]

    def _tail(self, outline: Outline, jobs: Sequence[Job], stages: Sequence[StagePrice]) -> float:
        memory = self.inputs.memory
        crowding = self.networks.crowding(outline.teams)
        reduce_s, gather_s, step_s, ahead_s = 0.0, 0.0, 0.0, 0.0
        for job, stage, crowd in zip(jobs, stages, crowding, strict=True):
            parameters = self.stages.memory.parameters(job.num_layers, job.place)
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
        return reduce_s + self.networks.statistics_s + step_s + gather_s

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
        layer = memory.layer_parameters()
        crowding = self.networks.crowding(outline.teams)
        collective_s, exposed_s, step_s = 0.0, 0.0, 0.0
        for job, stage, crowd in zip(jobs, stages, crowding, strict=True):
            parameters = self.stages.memory.parameters(job.num_layers, job.place)
            parts = job.num_chunks
            part = -(-parameters // parts)
            gather_s, reduce_s = (
                crowd * self.networks.even_gather_s(job.team, to_bytes(part), -(-part // layer))
                for to_bytes in (memory.parameter_bytes, memory.gradient_bytes)
            )
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
        tail_s = exposed_s + self.networks.statistics_s + step_s
        return Estimate(
            outline=outline,
            layers=tuple(job.num_layers for job in jobs),
            jobs=jobs,
            stages=stages,
            extras=self.flight.extras(outline),
            iteration_s=max(busy_s, collective_s, link_s) + fill_s + tail_s,
            busy_s=busy_s,
            loop_s=collective_s,
            link_s=link_s,
            fill_s=fill_s,
            tail_s=tail_s,
        )
