"""Baseline `stock`: the best plan that Megatron-LM itself can run, every GPU with the same work.

Pipeline times data parallelism over all GPUs in the order of ranks, stages of equally many layers,
one micro-batch size, equal shards (distributed optimizer), 1F1B, and one recomputation setting for
all. Leaving slow GPUs out is not tried: a plan covers all ranks of its cluster.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from zorse_megatron.planner.build import chunks_of, offload_of, recompute_of
from zorse_megatron.planner.estimate import Estimator
from zorse_megatron.planner.inputs import Inputs
from zorse_megatron.planner.jobs import Job, Place, Settings
from zorse_megatron.planner.judge import Judge, Verdict, best_first
from zorse_megatron.planner.microbatch import Share
from zorse_megatron.planner.teams import Team, Teams
from zorse_megatron.schema.plan import Group, Plan, Replica, Schedule

_SIMULATED = 6


@dataclass(frozen=True, kw_only=True)
class Grid:
    """One even layout."""

    stages: int
    micro_batch_size: int
    mode: str
    estimated_s: float


def stock_plans(inputs: Inputs, judge: Judge, teams: Teams) -> list[Verdict]:
    """Verdicts on the best grids that fit, fastest first."""
    grids = sorted(_grids(inputs, judge.estimator, teams), key=lambda grid: grid.estimated_s)
    verdicts: list[Verdict] = []
    for grid in grids:
        verdict = judge.judge_plan(_plan(inputs, teams, grid))
        if verdict is not None and verdict.fits:
            verdicts.append(verdict)
            if len(verdicts) == _SIMULATED:
                break
    return best_first(verdicts)


def _grids(inputs: Inputs, estimator: Estimator, teams: Teams) -> Iterator[Grid]:
    world, batch = inputs.world_size, inputs.global_batch_size
    for stages in range(1, world + 1):
        width = world // stages
        if world % stages or inputs.num_layers % stages or batch % width:
            continue
        for size in estimator.stages.levels():
            if batch % (width * size):
                continue
            for mode in inputs.space.recompute:
                estimated_s = _estimate(estimator, _teams(inputs, teams, stages), size, mode)
                if estimated_s is not None:
                    yield Grid(
                        stages=stages, micro_batch_size=size, mode=mode, estimated_s=estimated_s
                    )


def _teams(inputs: Inputs, teams: Teams, stages: int) -> list[Team]:
    width = inputs.world_size // stages
    return [teams.of(tuple(range(at * width, (at + 1) * width))) for at in range(stages)]


def _estimate(estimator: Estimator, found: list[Team], size: int, mode: str) -> float | None:
    """Slowest stage and time to fill; None where a rank has too little memory."""
    stages, inputs = estimator.stages, estimator.inputs
    layers = inputs.num_layers // len(found)
    settings = _settings(mode, layers)
    width = len(found[0].ranks)
    count = inputs.global_batch_size // (width * size)
    busy_s = fill_s = 0.0
    for at, team in enumerate(found):
        place = Place(
            is_first=at == 0,
            is_last=at == len(found) - 1,
            window=float((len(found) - at) * width * size),
        )
        job = Job(team, layers, (size,) * len(team.cells), place)
        share = stages.memory.shared_bytes(job, settings) / width
        need = share + stages.memory.local_bytes(job, settings, size, count)
        if any(need > cell.capacity_bytes for cell in team.cells):
            return None
        both_s = max(passes.both_s for passes in stages.passes(job, settings))
        busy_s = max(busy_s, count * both_s)
        fill_s += both_s
    return busy_s + fill_s


def _settings(mode: str, layers: int) -> Settings:
    recomputed = 0 if mode == "none" else layers
    return Settings(mode=mode, recomputed=recomputed)  # type: ignore[arg-type]


def _plan(inputs: Inputs, teams: Teams, grid: Grid) -> Plan:
    layers = inputs.num_layers // grid.stages
    width = inputs.world_size // grid.stages
    share = Share(
        micro_batch_size=grid.micro_batch_size,
        num_microbatches=inputs.global_batch_size // (width * grid.micro_batch_size),
    )
    settings = _settings(grid.mode, layers)
    groups = [
        even_group(team, {rank: share for rank in team.ranks}, settings, layers)
        for team in _teams(inputs, teams, grid.stages)
    ]
    # Stock knows one type for the whole job.
    one_type = inputs.dtype_of(range(inputs.world_size))
    groups = [replace(group, compute_dtype=one_type) for group in groups]
    return whole_plan(inputs, groups, [layers] * grid.stages, "1f1b", 1)


def even_group(
    team: Team, shares: dict[int, Share], settings: Settings, num_layers: int, num_chunks: int = 1
) -> Group:
    """A group with equal shards."""
    return Group(
        replicas=tuple(
            Replica(
                ranks=(rank,),
                micro_batch_size=shares[rank].micro_batch_size,
                num_microbatches=shares[rank].num_microbatches,
                shard_weight=1.0,
            )
            for rank in team.ranks
        ),
        recompute=recompute_of(settings, num_layers, num_chunks),
        offload=offload_of(settings),
    )


def whole_plan(
    inputs: Inputs, groups: list[Group], layers: list[int], schedule: str, num_chunks: int
) -> Plan:
    """Groups in model order as a plan."""
    return Plan(
        schema_version=1,
        global_batch_size=inputs.global_batch_size,
        model=inputs.model,
        groups=tuple(groups),
        chunks=chunks_of(layers, num_chunks),
        schedule=Schedule(name=schedule),  # type: ignore[arg-type]
        cluster=inputs.cluster,
    )
