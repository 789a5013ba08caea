"""Host memory by rank: the counterpart of the plan's offload settings.

In blocks of pinned memory, as a run on GPUs allocates them (`runtime.host_link`): for each chunk
one with its shard of parameters, one with that of gradients, one for each kind of optimizer state,
one for each tensor that layers keep of a micro-batch: their inputs only, if all are recomputed.
"""

from collections.abc import Mapping

from zorse_megatron.costs.pinned import pinned_bytes, pinned_state_bytes
from zorse_megatron.schedules.actions import COMPUTE, Kind
from zorse_megatron.simulate.result import SimulationResult
from zorse_megatron.simulate.timeline import Timeline

STATE, ACTIVATIONS, PARAMETERS = "optimizer state", "activations", "parameters"
GRADIENTS = "gradients"


def host_bytes(result: SimulationResult, rank: int) -> Mapping[str, int]:
    """Category -> bytes of a rank that wait in the host at most; empty where nothing does."""
    timeline = result.timeline
    stand_in = result.stands_in[rank]
    offload = timeline.sizes.settings[stand_in].offload
    found = {}
    if offload.optimizer_state:
        found[STATE] = _state_bytes(timeline, stand_in)
    if offload.activations:
        found[ACTIVATIONS] = _activation_bytes(timeline, stand_in)
    if offload.parameters:
        sizes = timeline.sizes
        found[PARAMETERS] = sum(
            pinned_bytes(sizes.memory_of(chunk).parameter_bytes(sizes.shards[chunk][stand_in]))
            for chunk in sizes.chunks(stand_in)
        )
    if offload.gradients:
        residency = timeline.program.tracks[stand_in].residency
        found[GRADIENTS] = sum(
            pinned_bytes(residency.shard_of_gradients(chunk))
            for chunk in residency.gradients_in_host
        )
    return found


def _state_bytes(timeline: Timeline, rank: int) -> int:
    sizes = timeline.sizes
    owned = {chunk: sizes.shards[chunk][rank] for chunk in sizes.chunks(rank)}
    return sum(
        pinned_state_bytes(sizes.memory_of(chunk).state_bytes(number), number)
        for chunk, number in owned.items()
    )


def _activation_bytes(timeline: Timeline, rank: int) -> int:
    """The most at one time. What its own backward follows at once stays on the GPU."""
    actions = [a for a in timeline.program.tracks[rank].actions if a.kind in COMPUTE]
    away: set[tuple[int | None, int | None]] = set()
    now = most = 0
    for number, action in enumerate(actions):
        key = action.chunk, action.micro_batch
        kept = _kept_bytes(timeline, rank, action.chunk or 0)
        after = actions[number + 1] if number + 1 < len(actions) else None
        if action.kind is Kind.BACKWARD:
            now -= kept if key in away else 0
        elif after is None or (after.chunk, after.micro_batch) != key:
            away.add(key)
            now += kept
            most = max(most, now)
    return most


def _kept_bytes(timeline: Timeline, rank: int, chunk: int) -> int:
    """Bytes of one micro-batch."""
    return sum(map(pinned_bytes, timeline.sizes.kept_tensors(rank, chunk)))
