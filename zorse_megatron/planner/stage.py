"""What a team costs with a number of layers, in closed form: time, memory, what it must give up.

Memory follows `simulate.ledger`: whole parameters and gradients (1f1b) or shards and the chunks in
use (breadth_first), what is kept of every micro-batch in flight, logits, buffers; optimizer state
(and shards) go wherever there is room in the team. If that does not fit, layers are recomputed, as
few as possible; if that is not enough, optimizer state and then activations wait in the host.
Of state in the host two pieces are on the GPU during the step, when activations are not: what has
to fit then is looked at apart.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from zorse_megatron.costs.interface import RecomputeMode
from zorse_megatron.planner.inputs import Inputs
from zorse_megatron.planner.teams import Cell, Team, round_of
from zorse_megatron.schedules.shards import passing_at_most

# Boundary activations that are on the way in and out at once, beside those in flight: the two
# inputs that are received early, the output that is being sent, and the same for gradients.
BUFFERS = 6
_SIZES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64)
# A replica's micro-batch may take so much longer than one sample on the team's slowest GPU.
_MOST_SLOWER = 1.5

Level = int | tuple[int, ...]
"""Largest micro-batch size of a group, or the micro-batch size of each of its cells."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a group does to fit."""

    mode: RecomputeMode = "none"
    recomputed: int = 0
    """Layers (of all its chunks together) that are recomputed."""
    offload_state: bool = False
    offload_activations: bool = False


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a team stands in the pipeline."""

    is_first: bool
    is_last: bool
    window: float
    """Samples in flight between forwards and backwards, once for each chunk (not breadth_first)."""
    schedule: str = "1f1b"
    num_chunks: int = 1


@dataclass(frozen=True)
class Job:
    """What is priced: a team with a number of layers, at a place."""

    team: Team
    num_layers: int
    sizes: tuple[int, ...]
    """Micro-batch size of each cell."""
    place: Place
    reserve_bytes: int = 0
    """To be left free on each GPU, beside the margin."""

    @property
    def num_chunks(self) -> int:
        """No more than there are layers."""
        return min(self.place.num_chunks, self.num_layers)

    @cached_property
    def round_samples(self) -> int:
        """Samples of one micro-batch on every GPU."""
        return round_of(self.team, self.sizes)

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for jobs that cost the same."""
        return self.team.look, self.num_layers, self.sizes, self.place, self.reserve_bytes


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
        memory = inputs.memory
        self.boundary = memory.boundary_bytes(1)
        self.kept: dict[str, int] = {
            mode: memory.activation_bytes(1, mode) for mode in ("none", "selective", "full")
        }
        self.head = memory.head_bytes(1)
        self.layer_parameters = memory.layer_parameters()
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
            free = self.free_bytes(job, counts, settings)
            if free < 0:
                continue
            price = self.priced(job, settings, free)
            found.append((price.busy_s + self.step_s(job, settings), order, price))
            if not settings.recomputed:
                break  # what follows offloads more, for nothing
        return min(found, key=lambda row: row[:2])[2] if found else None

    def step_s(self, job: Job, settings: Settings) -> float:
        """The optimizer step with even shards, state in the host included."""
        owned = self.parameters(job.num_layers, job.place) // len(job.team.ranks)
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
        if self._host_holds(job, Settings(offload_state=True), counts):
            yield from self._recomputing(job, counts, Settings(offload_state=True))
        # Only the inputs of layers can wait in the host, so all layers are recomputed with it.
        if "full" in self.inputs.space.recompute:
            both = Settings(
                mode="full",
                recomputed=job.num_layers,
                offload_state=True,
                offload_activations=True,
            )
            if self._copies_in_time(job, both) and self._host_holds(job, both, counts):
                yield both

    def _recomputing(self, job: Job, counts: Sequence[float], host: Settings) -> Iterator[Settings]:
        """Nothing, core attention, as few layers as fit, those that cost least time first."""
        space = self.inputs.space
        if "none" in space.recompute:
            yield host
        if "selective" in space.recompute and self.kept["selective"] < self.kept["none"]:
            yield replace(host, mode="selective", recomputed=job.num_layers)
        if "full" in space.recompute:
            yield from self._full(job, counts, host)

    def _copies_in_time(self, job: Job, settings: Settings) -> bool:
        """Whether the host link takes what a forward keeps in no more than the forward's time."""
        spared = self.kept["none"] - self.kept[settings.mode]
        kept = job.num_layers * self.kept["none"] - settings.recomputed * spared
        return all(
            passes.size * kept / cell.host_link_bytes_per_s <= passes.forward_s
            for cell, passes in zip(job.team.cells, self.passes(job, settings), strict=True)
        )

    def _host_holds(self, job: Job, settings: Settings, counts: Sequence[float]) -> bool:
        """Whether host memory takes what is offloaded; where its size is not known, it does."""
        state = self.inputs.memory.state_bytes(self.parameters(job.num_layers, job.place))
        spared = self.kept["none"] - self.kept[settings.mode] if settings.recomputed else 0
        kept = self.kept["none"] - spared * settings.recomputed / job.num_layers
        for cell, size, count in zip(job.team.cells, job.sizes, counts, strict=True):
            if cell.host_bytes is None:
                continue
            needed = state / len(job.team.ranks)
            if settings.offload_activations:
                needed += size * kept * self.layers_in_flight(job, count)
            if needed > cell.host_bytes:
                return False
        return True

    def _full(self, job: Job, counts: Sequence[float], host: Settings) -> Iterator[Settings]:
        """The least number of recomputed layers that fits, by bisection: memory only falls."""
        layers, step = job.num_layers, job.num_chunks  # as many layers of every chunk
        low, high = 1, max(1, -(-layers // step))

        def settings(number: int) -> Settings:
            return replace(host, mode="full", recomputed=min(layers, number * step))

        if "none" not in self.inputs.space.recompute:
            low = high
        if self.free_bytes(job, counts, settings(high)) < 0:
            return
        while low < high:
            middle = (low + high) // 2
            if self.free_bytes(job, counts, settings(middle)) >= 0:
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

    def parameters(self, num_layers: int, place: Place) -> int:
        """Parameters of a stage."""
        memory = self.inputs.memory
        total = num_layers * self.layer_parameters
        if place.is_first:
            total += memory.embedding_parameters()
        if place.is_last:
            tied = self.inputs.tied_embeddings and place.is_first
            total += memory.head_parameters(tied_on_same_rank=tied)
        return total

    def shared_bytes(self, job: Job, settings: Settings) -> int:
        """What is spread over the team by shard weights."""
        memory, parameters = self.inputs.memory, self.parameters(job.num_layers, job.place)
        total = 0 if settings.offload_state else memory.state_bytes(parameters)
        if job.place.schedule == "breadth_first":
            total += memory.parameter_bytes(parameters) + memory.gradient_bytes(parameters)
        return total

    def room_bytes(
        self, job: Job, settings: Settings, size: int, count: float, capacity_bytes: int
    ) -> float:
        """What a GPU has free for its part of `shared_bytes`; `size`, `count`: its micro-batches.

        During the passes, or during the step if state in the host passes through then.
        """
        in_passes = capacity_bytes - self.local_bytes(job, settings, size, count)
        if not settings.offload_state:
            return in_passes
        resident = 0 if job.place.schedule == "breadth_first" else self._whole_bytes(job)
        passing = passing_at_most(self.parameters(job.num_layers, job.place))
        resident += self.inputs.memory.state_bytes(passing) + job.reserve_bytes
        return min(in_passes, capacity_bytes - resident)

    def local_bytes(self, job: Job, settings: Settings, size: int, count: float) -> float:
        """What a replica has beside its share, if it runs `count` micro-batches of a size."""
        place, kept = job.place, self.kept
        spared = kept["none"] - kept[settings.mode] if settings.recomputed else 0
        layers = self.layers_in_flight(job, count)
        if settings.offload_activations:
            # One on its way out, one on its way in, one in use, each of one chunk.
            layers = min(layers, 3 * job.num_layers / job.num_chunks)
        by_layers = layers * (kept["none"] - spared * settings.recomputed / job.num_layers)
        alone = place.is_first and place.is_last and job.num_chunks == 1
        buffers = 0 if alone else BUFFERS * self.boundary
        head = again = 0.0
        if settings.recomputed:  # behind the head's backward, when its part is given back
            again = max(0, spared - self.head) if place.is_last else spared
        if place.is_last:
            in_flight = layers * job.num_chunks / job.num_layers
            head = self.head * (1.0 if place.schedule == "breadth_first" else min(in_flight, 2.0))
        moment = again + buffers + head if count else 0.0
        return self._whole_bytes(job) + size * (by_layers + moment) + job.reserve_bytes

    def layers_in_flight(self, job: Job, count: float) -> float:
        """Layers times micro-batches between forward and backward, of a replica with `count`."""
        place = job.place
        if place.schedule == "breadth_first":
            every = math.ceil(count) * job.num_layers
            # On the model's last chunk every forward is followed by its backward.
            turned = (math.ceil(count) - 1) * (job.num_layers // job.num_chunks)
            return every - max(0, turned) if place.is_last else every
        return self.limit(place, count) * job.num_layers / job.num_chunks

    def _whole_bytes(self, job: Job) -> int:
        """Whole parameters and gradients on each GPU."""
        memory = self.inputs.memory
        parameters = self.parameters(job.num_layers, job.place)
        if job.place.schedule != "breadth_first":
            return memory.parameter_bytes(parameters) + memory.gradient_bytes(parameters)
        # Two chunks at most: one in use, one being gathered or reduced.
        layers = min(job.num_chunks, 2) * -(-job.num_layers // job.num_chunks)
        both = layers * self.layer_parameters + self.parameters(0, job.place)
        return memory.parameter_bytes(both) + memory.gradient_bytes(both)

    def limit(self, place: Place, count: float) -> float:
        """Micro-batches in flight, once for each chunk, as the schedules share out the window."""
        if place.is_last and place.schedule == "1f1b" and count:
            return 1  # backwards go first, and the last group always has one to run
        limit = math.ceil(place.window * count / self.inputs.global_batch_size - 1e-9)
        return min(math.ceil(count) * place.num_chunks, max(1, limit)) if count else 0

    def free_bytes(self, job: Job, counts: Sequence[float], settings: Settings) -> float:
        """Bytes that are left in the team, below 0 where something does not fit."""
        room, least = 0.0, math.inf
        for cell, size, count in zip(job.team.cells, job.sizes, counts, strict=True):
            # Whole micro-batches: some replicas run one more than others.
            whole = math.ceil(count - 1e-9)
            one = self.room_bytes(job, settings, size, whole, cell.capacity_bytes)
            least = min(least, one)
            room += len(cell.ranks) * one
        return least if least < 0 else room - self.shared_bytes(job, settings)

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
