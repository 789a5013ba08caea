"""Memory of a device group with a number of layers, in closed form.

As in `simulate.ledger`: whole parameters and gradients (1f1b) or shards and the chunks in use
(breadth_first), what is kept of every micro-batch in flight, logits, buffers; optimizer state (and
shards) go wherever there is room in the team. Of state in the host two pieces are on the GPU during
the step, when activations are not: what has to fit then is looked at apart.
"""

import math
from collections.abc import Sequence

from zorse_megatron.costs.pinned import pinned_bytes, pinned_state_bytes
from zorse_megatron.planner.closed_form.stage import Job, Place, Settings
from zorse_megatron.planner.inputs.search_inputs import Inputs
from zorse_megatron.schedules.shards import passing_at_most

# Boundary activations that are on the way in and out at once, beside those in flight: the two
# inputs that are received early, the output that is being sent, and the same for gradients.
BUFFERS = 6


class StageMemory:
    """Bytes of jobs: of each GPU, of the team, of what is in flight."""

    def __init__(self, inputs: Inputs) -> None:
        self.inputs = inputs
        self.costs = costs = inputs.memory
        self.boundary = costs.boundary_bytes(1)
        self.kept: dict[str, int] = {
            mode: costs.activation_bytes(1, mode) for mode in ("none", "selective", "full")
        }
        self.spared = {mode: self.kept["none"] - kept for mode, kept in self.kept.items()}
        """What a recomputed layer does not keep."""
        self.head = costs.head_bytes(1)
        self.layer_parameters = costs.layer_parameters()

    def parameters(self, num_layers: int, place: Place) -> int:
        """Parameters of a stage."""
        costs = self.costs
        total = num_layers * self.layer_parameters
        if place.is_first:
            total += costs.embedding_parameters()
        if place.is_last:
            tied = self.inputs.tied_embeddings and place.is_first
            total += costs.head_parameters(tied_on_same_rank=tied)
        return total

    def shared_bytes(self, job: Job, settings: Settings) -> int:
        """What is spread over the team by shard weights."""
        costs, parameters = self.costs, self.parameters(job.num_layers, job.place)
        total = 0 if settings.offload_state else costs.state_bytes(parameters)
        if job.place.schedule == "breadth_first":
            total += costs.parameter_bytes(parameters) + costs.gradient_bytes(parameters)
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
        resident += self.costs.state_bytes(passing) + job.reserve_bytes
        return min(in_passes, capacity_bytes - resident)

    def local_bytes(self, job: Job, settings: Settings, size: int, count: float) -> float:
        """What a replica has beside its share, if it runs `count` micro-batches of a size."""
        place, spared = job.place, self.spared[settings.mode]
        layers = self.layers_in_flight(job, count)
        if settings.offload_activations:
            # One on its way out, one on its way in, one in use, each of one chunk.
            layers = min(layers, 3 * job.num_layers / job.num_chunks)
        by_layers = layers * (self.kept["none"] - spared * settings.recomputed / job.num_layers)
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
        costs = self.costs
        parameters = self.parameters(job.num_layers, job.place)
        if job.place.schedule != "breadth_first":
            return costs.parameter_bytes(parameters) + costs.gradient_bytes(parameters)
        # Two chunks at most: one in use, one being gathered or reduced.
        layers = min(job.num_chunks, 2) * -(-job.num_layers // job.num_chunks)
        both = layers * self.layer_parameters + self.parameters(0, job.place)
        return costs.parameter_bytes(both) + costs.gradient_bytes(both)

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

    def host_holds(self, job: Job, settings: Settings, counts: Sequence[float]) -> bool:
        """Whether host memory takes what is offloaded; where its size is not known, it does.

        In pinned blocks, as in `simulate.host_memory`, of chunks and shards of equal size.
        """
        parameters = self.parameters(job.num_layers, job.place)
        owned = -(-parameters // (len(job.team.ranks) * job.num_chunks))
        state = job.num_chunks * pinned_state_bytes(self.costs.state_bytes(owned), owned)
        spared = self.spared[settings.mode]
        kept = self.kept["none"] - spared * settings.recomputed / job.num_layers
        for cell, size, count in zip(job.team.cells, job.sizes, counts, strict=True):
            if cell.host_bytes is None:
                continue
            needed: float = state
            if settings.offload_activations:
                block = pinned_bytes(math.ceil(size * kept))
                needed += block * self.layers_in_flight(job, count)
            if needed > cell.host_bytes:
                return False
        return True
