"""Cost of a device group with a number of layers, in closed form: time, recomputation, offload.

If memory (see `stage_memory`) does not suffice, layers are recomputed, as few as possible; if that
is not enough, optimizer state and then activations wait in the host.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from zorse_megatron.planner.closed_form.device_groups import Cell, Team
from zorse_megatron.planner.closed_form.stage import Job, Level, Settings
from zorse_megatron.planner.closed_form.stage_memory import StageMemory
from zorse_megatron.planner.inputs.search_inputs import Inputs

_SIZES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64)
# A replica's micro-batch may take so much longer than one sample on the team's slowest GPU.
_MOST_SLOWER = 1.5


@dataclass(frozen=True, kw_only=True)
class Passes:
    """One micro-batch of a cell through the stage."""

    size: int
    forward_s: float
    backward_s: float

    @property
    def both_s(self) -> float:
        """Forward and backward."""
        return self.forward_s + self.backward_s


@dataclass(frozen=True, kw_only=True)
class StagePrice:
    """A team with a number of layers."""

    num_layers: int
    settings: Settings
    passes: tuple[Passes, ...]
    """By cell."""
    busy_s: float
    """Of its slowest replica, with whole micro-batches."""
    forward_s: float
    """Longest forward of a micro-batch."""
    backward_s: float
    mean_passage_s: float
    """Forward and backward of a micro-batch, mean over samples."""
    free_bytes: float
    """What is left in the team when all is placed; at least 0."""


class Stages:
    """Prices stages, each once."""

    def __init__(self, inputs: Inputs) -> None:
        self.inputs = inputs
        self.memory = StageMemory(inputs)
        self._prices: dict[tuple[object, ...], StagePrice | None] = {}
        self._sizes: dict[tuple[object, ...], tuple[int, ...]] = {}
        self._counts: dict[tuple[object, ...], tuple[float, ...]] = {}
        self._layer_times: dict[tuple[str, int], tuple[float, float]] = {}

    # Micro-batch sizes.

    def levels(self) -> tuple[int, ...]:
        """Caps on the micro-batch size that are tried."""
        most = self.inputs.space.max_micro_batch_size or _SIZES[-1]
        most = min(most, self.inputs.global_batch_size)
        return tuple(size for size in _SIZES if size <= most)

    def sizes(self, team: Team, level: Level) -> tuple[int, ...]:
        """Micro-batch size of each cell: as given, or the one with the best rate up to the level.

        In the latter case slow GPUs take smaller ones, so that a sample takes about as long on any
        replica.
        """
        if isinstance(level, tuple):
            return level
        key = (team.look, level)
        if key not in self._sizes:
            slowest = max(self._sample_s(cell, 1) for cell in team.cells)
            fastest = min(self._sample_s(cell, level) * level for cell in team.cells)
            limit = _MOST_SLOWER * max(slowest, fastest)
            self._sizes[key] = tuple(self._best_size(cell, level, limit) for cell in team.cells)
        return self._sizes[key]

    def _best_size(self, cell: Cell, level: int, limit_s: float) -> int:
        allowed = [
            m for m in range(1, level + 1) if m == 1 or self._sample_s(cell, m) * m <= limit_s
        ]
        return min(allowed, key=lambda m: (self._sample_s(cell, m), m))

    def _sample_s(self, cell: Cell, size: int) -> float:
        forward_s, backward_s = self.layer_s(cell.kind, size)
        return (forward_s + backward_s) / size

    def layer_s(self, kind: str, size: int) -> tuple[float, float]:
        """Forward and backward of one layer."""
        key = (kind, size)
        times = self._layer_times.get(key)
        if times is None:
            found = self.inputs.compute.layer(kind, size)
            times = self._layer_times[key] = (found.forward_s, found.backward_s)
        return times

    # Prices.

    def price(self, job: Job) -> StagePrice | None:
        """The cheapest way to fit; None where there is none."""
        key = job.key
        if key not in self._prices:
            self._prices[key] = self._find(job)
        return self._prices[key]

    def _find(self, job: Job) -> StagePrice | None:
        """Of all ways to fit the one that takes least time: recomputation costs in every pass,
        copies of optimizer state once an iteration."""
        counts = self.counts(job)
        found: list[tuple[float, int, StagePrice]] = []
        for order, settings in enumerate(self._ways(job, counts)):
            free = self.memory.free_bytes(job, counts, settings)
            if free < 0:
                continue
            price = self.priced(job, settings, free)
            found.append((price.busy_s + self.step_s(job, settings), order, price))
            if not settings.recomputed:
                break  # what follows offloads more, for nothing
        return min(found, key=lambda row: row[:2])[2] if found else None

    def step_s(self, job: Job, settings: Settings) -> float:
        """The optimizer step with even shards, state in the host included."""
        owned = self.memory.parameters(job.num_layers, job.place) // len(job.team.ranks)
        compute_s = max(self.inputs.compute.step_s(cell.kind, owned) for cell in job.team.cells)
        if not settings.offload_state:
            return compute_s
        slowest = min(cell.host_link_bytes_per_s for cell in job.team.cells)
        return max(compute_s, self.inputs.memory.state_bytes(owned) / slowest)

    def _ways(self, job: Job, counts: Sequence[float]) -> Iterator[Settings]:
        """Settings to try: recomputation with what it can spare, with and without host memory."""
        yield from self._recomputing(job, counts, Settings())
        if not self.inputs.space.offload:
            return
        if self.memory.host_holds(job, Settings(offload_state=True), counts):
            yield from self._recomputing(job, counts, Settings(offload_state=True))
        # Only the inputs of layers can wait in the host, so all layers are recomputed with it.
        if "full" in self.inputs.space.recompute:
            both = Settings(
                mode="full",
                recomputed=job.num_layers,
                offload_state=True,
                offload_activations=True,
            )
            if self._copies_in_time(job, both) and self.memory.host_holds(job, both, counts):
                yield both

    def _recomputing(self, job: Job, counts: Sequence[float], host: Settings) -> Iterator[Settings]:
        """Nothing, core attention, as few layers as fit, those that cost least time first."""
        space = self.inputs.space
        if "none" in space.recompute:
            yield host
        if "selective" in space.recompute and self.memory.spared["selective"] > 0:
            yield replace(host, mode="selective", recomputed=job.num_layers)
        if "full" in space.recompute:
            yield from self._full(job, counts, host)

    def _copies_in_time(self, job: Job, settings: Settings) -> bool:
        """Whether the host link takes what a forward keeps in no more than the forward's time."""
        memory, spared = self.memory, self.memory.spared[settings.mode]
        kept = job.num_layers * memory.kept["none"] - settings.recomputed * spared
        return all(
            passes.size * kept / cell.host_link_bytes_per_s <= passes.forward_s
            for cell, passes in zip(job.team.cells, self.passes(job, settings), strict=True)
        )

    def _full(self, job: Job, counts: Sequence[float], host: Settings) -> Iterator[Settings]:
        """The least number of recomputed layers that fits, by bisection: memory only falls."""
        layers, step = job.num_layers, job.num_chunks  # as many layers of every chunk
        low, high = 1, max(1, -(-layers // step))

        def settings(number: int) -> Settings:
            return replace(host, mode="full", recomputed=min(layers, number * step))

        if "none" not in self.inputs.space.recompute:
            low = high
        if self.memory.free_bytes(job, counts, settings(high)) < 0:
            return
        while low < high:
            middle = (low + high) // 2
            if self.memory.free_bytes(job, counts, settings(middle)) >= 0:
                high = middle
            else:
                low = middle + 1
        yield settings(low)

    def passes(self, job: Job, settings: Settings) -> tuple[Passes, ...]:
        """One micro-batch of each cell through all of the stage's layers, ends included."""
        compute, result = self.inputs.compute, []
        for cell, size in zip(job.team.cells, job.sizes, strict=True):
            one = self.layer_s(cell.kind, size)
            forward_s, backward_s = job.num_layers * one[0], job.num_layers * one[1]
            if settings.recomputed:
                again_s = compute.recompute_s(cell.kind, size, settings.mode)
                backward_s += settings.recomputed * again_s
            if job.place.is_first:
                ends = compute.embedding(cell.kind, size)
                forward_s, backward_s = forward_s + ends.forward_s, backward_s + ends.backward_s
            if job.place.is_last:
                ends = compute.head(cell.kind, size)
                forward_s, backward_s = forward_s + ends.forward_s, backward_s + ends.backward_s
            result.append(Passes(size=size, forward_s=forward_s, backward_s=backward_s))
        return tuple(result)

    def counts(self, job: Job) -> tuple[float, ...]:
        """Micro-batches of one replica of each cell, if the batch is cut at will."""
        place = job.place
        key = (job.team.look, job.num_layers, job.sizes, place.is_first, place.is_last)
        if key not in self._counts:
            self._counts[key] = self._find_counts(job)
        return self._counts[key]

    def _find_counts(self, job: Job) -> tuple[float, ...]:
        passes = self.passes(job, Settings())
        rates = [each.size / each.both_s for each in passes]
        cells = job.team.cells
        total = sum(len(cell.ranks) * rate for cell, rate in zip(cells, rates, strict=True))
        batch = self.inputs.global_batch_size
        return tuple(
            batch * rate / total / each.size for rate, each in zip(rates, passes, strict=True)
        )

    def priced(self, job: Job, settings: Settings, free: float) -> StagePrice:
        """Times of a job with these settings."""
        passes = self.passes(job, settings)
        busy_s, mean_s = self._busy(job.team, passes)
        return StagePrice(
            num_layers=job.num_layers,
            settings=settings,
            passes=passes,
            busy_s=busy_s,
            forward_s=max(each.forward_s for each in passes),
            backward_s=max(each.backward_s for each in passes),
            mean_passage_s=mean_s,
            free_bytes=free,
        )

    def _busy(self, team: Team, passes: Sequence[Passes]) -> tuple[float, float]:
        """Time of the slowest replica with whole micro-batches, and mean passage of a sample."""
        batch = self.inputs.global_batch_size
        rows = [
            (len(cell.ranks) * each.size, each.both_s)
            for cell, each in zip(team.cells, passes, strict=True)
        ]
        rate = sum(samples / both_s for samples, both_s in rows)
        mean_s = sum(samples for samples, _ in rows) / rate  # weighted by samples per second
        limit_s = batch / rate * (1 - 1e-12)
        while True:
            done = sum(samples * math.floor(limit_s / s * (1 + 1e-9)) for samples, s in rows)
            if done >= batch:
                return limit_s, mean_s
            limit_s = min((math.floor(limit_s / s * (1 + 1e-9)) + 1) * s for _, s in rows)
