"""What the first forward after a GATHER waits for: each layer for its own parameters.

The runtime gathers a sharded chunk in buckets of a layer each, in the order in which a forward asks
for them, and each layer waits for its own (`adapter.data_parallel.parameter_gathers`). Of n layers
that take f each, and whose parameters arrive every g from when the first have, the last ends at
max((n - 1) g, (n - 1) f) + f after that: either no layer after the first waits, or the last one
starts when its parameters arrive. So the gather is three parts at most: the first layer with the
embedding before it, the other layers, and the head. All layers but one run after the first, the
last layer after the second, the head after the third.
"""

from dataclasses import dataclass, replace

from zorse_megatron.schedules.breadth_first import RESIDENT, parameters_setting
from zorse_megatron.simulate.rank_sizes import RankSizes


@dataclass(frozen=True, kw_only=True)
class GatherPart:
    """Buckets that are waited for together, and what a forward computes once they are there."""

    buckets: int
    """How many; all that there are in `EVERYTHING`."""
    layers: float
    """Share of the layers' time."""
    embedding: bool = False
    head: bool = False


EVERYTHING = GatherPart(buckets=0, layers=1.0, embedding=True, head=True)


def gather_parts(sizes: RankSizes, rank: int, chunk: int) -> tuple[GatherPart, ...]:
    """The parts of a chunk's GATHER in the order in which they arrive.

    `EVERYTHING` where a forward waits for all: where chunks stay unsharded buckets are Megatron's,
    which without --overlap-grad-reduce is one, and where replicas cut layers differently GATHER
    stops the main stream.
    """
    if (
        parameters_setting(sizes.plan) == RESIDENT
        or sizes.parted[chunk] is not None
        or len(sizes.peers_of(rank, chunk)) == 1
    ):
        return (EVERYTHING,)
    layers = sizes.num_layers(chunk)
    embedding, layer, head = sizes.sections(chunk, sizes.part(rank))
    if not (layer and layers):
        return (EVERYTHING,)
    last = 1 / layers if layers > 1 else 0.0
    parts = (
        GatherPart(buckets=bool(embedding) + 1, layers=1.0 - last, embedding=True),
        GatherPart(buckets=layers - 1, layers=last),
        GatherPart(buckets=int(bool(head)), layers=0.0),
    )
    *found, last_part = (part for part in parts if part.buckets)
    return (*found, replace(last_part, head=True)) if found else (EVERYTHING,)
