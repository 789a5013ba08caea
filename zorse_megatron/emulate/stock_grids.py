"""Stock Megatron's even layouts: pipeline times data parallelism, one of everything for all.

Stages have equally many layers, where stock may count embedding and output layer as one each
(`--account-for-embedding-in-pipeline-split`, `--account-for-loss-in-pipeline-split`); so 26 layers
make four stages, of 6, 7, 7 and 6. One micro-batch size, one recomputation setting, a distributed
optimizer with equal shards, 1F1B, ranks in the order of the cluster: what a user gets without
writing a layout by hand.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from zorse_megatron.costs.interface import RecomputeMode
from zorse_megatron.emulate.tiny import HIDDEN_SIZE
from zorse_megatron.planner.inputs import Inputs
from zorse_megatron.planner.simulate_plan import simulate_plan
from zorse_megatron.schema.plan import Chunk, Group, Plan, Recompute, Replica, Schedule
from zorse_megatron.simulate.framework import STOCK_1F1B

_SIZES = (1, 2, 4, 8, 16)
_MODES: tuple[RecomputeMode, ...] = ("none", "selective", "full")
# Stock's default: buckets of so many parameters (`DistributedDataParallel.__init__`).
_BUCKET_PARAMETERS = 40_000_000
_TINY_LAYER_PARAMETERS = 12 * HIDDEN_SIZE**2 + 13 * HIDDEN_SIZE


@dataclass(frozen=True, kw_only=True)
class Grid:
    """One even layout."""

    layers: tuple[int, ...]
    """Of each stage."""
    counts_ends: tuple[bool, bool]
    """Whether embedding and output layer count as a layer each."""
    width: int
    """Data-parallel ranks of each stage."""
    micro_batch_size: int
    mode: RecomputeMode

    @property
    def words(self) -> str:
        """For people."""
        layers = "" if len(set(self.layers)) == 1 else f" ({'+'.join(map(str, self.layers))})"
        return (
            f"PP {len(self.layers)}{layers} DP {self.width}, micro-batches of "
            f"{self.micro_batch_size}, recompute {self.mode}"
        )


@dataclass(frozen=True, kw_only=True)
class PricedGrid:
    """A layout, by the simulator."""

    grid: Grid
    iteration_s: float
    fullest: float
    """Highest peak of a rank over what its GPU may hold; it fits up to 1."""


def best_grid(inputs: Inputs) -> PricedGrid | None:
    """The fastest that fits; if none does, the one that comes closest. None: no grid at all."""
    priced = [_priced(inputs, grid) for grid in grids(inputs)]
    fitting = [each for each in priced if each.fullest <= 1]
    if fitting:
        return min(fitting, key=lambda each: each.iteration_s)
    return min(priced, key=lambda each: each.fullest, default=None)


def grids(inputs: Inputs) -> Iterator[Grid]:
    """All of them."""
    batch = inputs.global_batch_size
    for stages in range(1, inputs.world_size + 1):
        width = inputs.world_size // stages
        split = stages_of(inputs.num_layers, stages)
        if inputs.world_size % stages or batch % width or split is None:
            continue
        for size, mode in itertools.product(_SIZES, _MODES):
            if batch % (width * size) == 0:
                yield Grid(
                    layers=split[0],
                    counts_ends=split[1],
                    width=width,
                    micro_batch_size=size,
                    mode=mode,
                )


def stages_of(num_layers: int, stages: int) -> tuple[tuple[int, ...], tuple[bool, bool]] | None:
    """Layers of each stage, and which ends count as one; None where they cannot be even.

    >>> stages_of(26, 4)
    ((6, 7, 7, 6), (True, True))
    """
    for ends in ((False, False), (True, True), (False, True), (True, False)):
        total = num_layers + sum(ends)
        if total % stages or (stages == 1 and any(ends)):
            continue
        layers = [total // stages] * stages
        layers[0] -= ends[0]
        layers[-1] -= ends[1]
        if min(layers) > 0:
            return tuple(layers), ends
    return None


def plan_of_grid(inputs: Inputs, grid: Grid) -> Plan:
    """The same layout as a plan, for the simulator."""
    count = inputs.global_batch_size // (grid.width * grid.micro_batch_size)
    groups, chunks, first = [], [], 0
    for stage, layers in enumerate(grid.layers):
        ranks = range(stage * grid.width, (stage + 1) * grid.width)
        replicas = tuple(
            Replica(
                ranks=(rank,),
                micro_batch_size=grid.micro_batch_size,
                num_microbatches=count,
                shard_weight=1.0,
            )
            for rank in ranks
        )
        groups.append(Group(replicas=replicas, recompute=Recompute(mode=grid.mode)))
        chunks.append(Chunk(group=stage, layers=(first, first + layers)))
        first += layers
    return Plan(
        schema_version=1,
        global_batch_size=inputs.global_batch_size,
        model=inputs.model,
        groups=tuple(groups),
        chunks=tuple(chunks),
        schedule=Schedule(name="1f1b"),
        cluster=inputs.cluster,
    )


def flags_of_grid(inputs: Inputs, grid: Grid) -> tuple[str, ...]:
    """Megatron's flags, with those that hide communication behind computation.

    Buckets of gradients are cut where those of the real model would be.
    """
    scale = _TINY_LAYER_PARAMETERS / inputs.memory.layer_parameters()
    flags = [
        *("--pipeline-model-parallel-size", str(len(grid.layers))),
        *("--micro-batch-size", str(grid.micro_batch_size)),
        *("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"),
        *("--ddp-bucket-size", str(max(1, round(_BUCKET_PARAMETERS * scale)))),
    ]
    if grid.counts_ends[0]:
        flags.append("--account-for-embedding-in-pipeline-split")
    if grid.counts_ends[1]:
        flags.append("--account-for-loss-in-pipeline-split")
    if grid.mode == "selective":
        flags += ["--recompute-granularity", "selective"]
    elif grid.mode == "full":
        flags += ["--recompute-granularity", "full", "--recompute-method", "uniform"]
        flags += ["--recompute-num-layers", "1"]
    return tuple(flags)


def _priced(inputs: Inputs, grid: Grid) -> PricedGrid:
    result = simulate_plan(inputs, plan_of_grid(inputs, grid), framework=STOCK_1F1B)
    fullest = max(
        peak / capacity
        for peak, capacity in zip(result.peak_memory_bytes, inputs.capacities_bytes, strict=True)
    )
    return PricedGrid(grid=grid, iteration_s=result.iteration_s, fullest=fullest)
