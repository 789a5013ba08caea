"""Random valid plans for property tests.

`plans()` draws what the rules allow and people rarely write by hand: groups whose ranks are not in
order, groups that are not in model order, replicas of one group with different micro-batch sizes
and counts, replicas without micro-batches, replicas without a shard, computations and transfers
whose times are equal, unequal or not known, limits of what is in flight that are tight or wide,
groups that compute weight gradients apart. It shrinks towards one rank that holds all layers and
runs the batch in one micro-batch.
`trained_plans()` has all of that and tensor-parallel groups of any parts, for a model that is
trained: every key of the plan file but `grad_reduce_dtype`, which rounds.
Strategies for parts are made once: hypothesis checks each new one, which takes longer than to draw
from it.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from zorse_megatron.plan.memory_settings import settings_in
from zorse_megatron.plan.plan import (
    Chunk,
    ClusterFingerprint,
    ExpertParallel,
    Group,
    Halved,
    ModelFingerprint,
    Offload,
    Plan,
    Predictions,
    Recompute,
    Replica,
    Schedule,
    ScheduleName,
    TpShards,
    TransferTime,
    has_equal_tp_shards,
)
from zorse_megatron.plan.rules import SCHEDULE_PARAMETERS, hierarchical_problems
from zorse_megatron.schedule.pipeline_schedules import RESIDENT, parameters_setting

Integers = int | SearchStrategy[int]
_RECOMPUTE = (
    None,
    Recompute(mode="selective"),
    Recompute(mode="full"),
    Recompute(mode="full", num_layers=1),
)

_RECOMPUTES = st.sampled_from(_RECOMPUTE)
_FLAG = st.booleans()
_SPLITS = st.sampled_from([None, True, False])
# Even shares, no share, small integers, and fractions that do not divide evenly.
_SHARD_WEIGHTS = st.one_of(
    st.sampled_from([1.0, 0.0, 2.0, 3.0]),
    st.floats(min_value=0.01, max_value=8.0, allow_subnormal=False),
)
_SECONDS = st.sampled_from([1.0, 2.0, 0.25]) | st.floats(0.01, 4)
_MAY_BE_NONE_S = st.just(0.0) | _SECONDS
_COMPUTE_TIMES = st.tuples(_SECONDS, _SECONDS, _MAY_BE_NONE_S)
_TRANSFERS = st.none() | st.builds(
    TransferTime, latency_s=_MAY_BE_NONE_S, s_per_sample=_MAY_BE_NONE_S
)

# Any text without controls: no separators of lines, nothing that turns the direction of writing.
NAMES = st.text(st.characters(exclude_categories=["C", "Zl", "Zp"]))


@st.composite
def plans(
    draw: DrawFn,
    max_world: int = 8,
    max_groups: int = 4,
    num_layers: Integers | None = None,
    global_batch_size: Integers | None = None,
    *,
    min_groups: int = 1,
    max_chunks_per_group: int = 1,
    max_ranks_per_replica: int = 1,
    schedule_names: tuple[ScheduleName, ...] = ("1f1b",),
    with_schedule_parameters: bool = False,
    with_options: bool = False,
) -> Plan:
    """Draw a plan without problems.

    `num_layers` and `global_batch_size` are numbers or strategies; without them, few layers and
    small batches are drawn. `with_schedule_parameters` also draws settings of the schedule;
    `with_options` what may be left out: names, recompute, offload, model sizes, cluster,
    predictions.
    """
    layers = _number(draw, num_layers, st.integers(min_groups, max(max_groups, 8)))
    batch = _number(draw, global_batch_size, st.integers(1, 16))
    members = _members(draw, max_world, min_groups, min(max_groups, layers), max_ranks_per_replica)
    groups = tuple(
        Group(
            replicas=_replicas(
                draw, ranks, batch, with_options, halves="breadth_first" not in schedule_names
            ),
            **_group_options(draw, with_options),
        )
        for ranks in members
    )
    world_size = sum(len(ranks) for group in members for ranks in group)
    plan = Plan(
        schema_version=2,
        global_batch_size=batch,
        model=ModelFingerprint(num_layers=layers, **_model_options(draw, with_options)),
        groups=groups,
        chunks=_chunks(draw, len(groups), layers, max_chunks_per_group),
        schedule=_schedule(draw, schedule_names, with_schedule_parameters),
        **_plan_options(draw, with_options, world_size),
    )
    split = tuple(replace(group, split_backward=draw(_SPLITS)) for group in plan.groups)
    return with_random_order(draw, replace(plan, groups=split))


@st.composite
def lowerable_plans(
    draw: DrawFn,
    max_world: int = 8,
    max_groups: int = 4,
    *,
    num_layers: Integers | None = None,
    global_batch_size: Integers | None = None,
    max_chunks_per_group: int = 4,
    max_ranks_per_replica: int = 1,
    schedule_names: tuple[ScheduleName, ...] = ("breadth_first", "interleaved"),
) -> Plan:
    """Draw plans with several chunks per group, which recompute and offload what they may."""
    plan = draw(
        plans(
            max_world,
            max_groups,
            st.integers(max_groups, 4 * max_groups) if num_layers is None else num_layers,
            global_batch_size,
            max_chunks_per_group=max_chunks_per_group,
            max_ranks_per_replica=max_ranks_per_replica,
            schedule_names=schedule_names,
            with_schedule_parameters=True,
        )
    )
    may_offload_parameters = parameters_setting(plan) != RESIDENT
    groups = tuple(_with_moves(draw, group, may_offload_parameters) for group in plan.groups)
    return replace(plan, groups=groups)


@st.composite
def trained_plans(
    draw: DrawFn,
    model: ModelFingerprint,
    batch: int,
    *,
    max_world: int,
    max_ranks_per_replica: int,
    in_tp_groups: bool = True,
) -> Plan:
    """Draw plans that train a model in fp32, whose sizes `model` has.

    Without `in_tp_groups` the ranks of a replica share nothing but experts.
    """
    parts: dict[str, Any] = {
        "num_layers": model.num_layers,
        "global_batch_size": batch,
        "max_ranks_per_replica": max_ranks_per_replica,
    }
    drawn = st.one_of(plans(max_world, 3, **parts), lowerable_plans(max_world, 3, **parts))
    plan = in_ascending_order(draw(drawn))
    return replace(
        plan,
        model=draw(st.sampled_from([model, ModelFingerprint(num_layers=model.num_layers)])),
        groups=tuple(
            _trained_group(draw, plan, group, model, in_tp_groups) for group in plan.groups
        ),
        **_plan_options(draw, True, plan.world_size),
    )


def in_ascending_order(plan: Plan) -> Plan:
    """The plan, with the ranks of each tensor-parallel group in ascending order."""
    groups = tuple(
        replace(
            group,
            replicas=tuple(replace(r, ranks=tuple(sorted(r.ranks))) for r in group.replicas),
        )
        for group in plan.groups
    )
    return replace(plan, groups=groups)


def _trained_group(
    draw: DrawFn, plan: Plan, group: Group, model: ModelFingerprint, in_tp_groups: bool
) -> Group:
    """The group with tensor-parallel parts or shared experts, regions and a name."""
    replicas = tuple(
        replace(
            _with_tp_shards_or_shared_experts(draw, group, each, model, in_tp_groups),
            region=draw(st.sampled_from([None, "east", "west", "west"])),
        )
        for each in group.replicas
    )
    named = replace(
        group,
        name=draw(_GROUP_OPTIONS["name"]),
        compute_dtype=draw(st.sampled_from([None, "fp32"])),
        replicas=replicas,
    )
    if not has_equal_tp_shards(named):  # what such a group may not offload
        named = replace(
            named,
            offload=_kept_on_device(named.offload),
            replicas=tuple(replace(r, offload=_kept_on_device(r.offload)) for r in replicas),
        )
    summed = replace(named, hierarchical=draw(st.sampled_from([True, True, False])))
    return named if list(hierarchical_problems(replace(plan, groups=(summed,)))) else summed


def _kept_on_device(offload: Offload | None) -> Offload | None:
    return offload and replace(offload, parameters=False, gradients=False)


def _with_tp_shards_or_shared_experts(
    draw: DrawFn, group: Group, replica: Replica, model: ModelFingerprint, in_tp_groups: bool
) -> Replica:
    degree = len(replica.ranks)
    if model.num_experts and degree > 1 and not (in_tp_groups and draw(_FLAG)):
        recompute = settings_in(group, replica).recompute
        whole = recompute is not None and recompute.mode == "full"
        return _sharing_experts(draw, replica, model.num_experts, may_overlap=not whole)
    return replace(replica, tp_shards=_tp_shards(draw, degree, model))


def _sharing_experts(
    draw: DrawFn, replica: Replica, num_experts: int, *, may_overlap: bool = False
) -> Replica:
    """The replica, whose ranks have any samples and experts, also none."""
    degree = len(replica.ranks)
    weights = tuple(draw(_SHARD_WEIGHTS) for _ in replica.ranks)
    overlap = may_overlap and replica.micro_batch_size % 2 == 0 and draw(_FLAG)
    parts = 2 if overlap else 1
    samples = _parts(draw, replica.micro_batch_size // parts, degree)
    shared = ExpertParallel(
        experts=tuple(_parts(draw, num_experts, degree)),
        samples=tuple(parts * count for count in samples),
        shard_weights=weights if any(weights) else None,
        overlap=overlap,
    )
    return replace(replica, expert_parallel=shared, halved=None)


@st.composite
def that_share_experts(draw: DrawFn, drawn: SearchStrategy[Plan]) -> Plan:
    """Plans in which ranks of some replicas share nothing but experts."""
    plan = in_ascending_order(draw(drawn))
    groups = tuple(
        replace(
            group,
            replicas=tuple(
                _sharing_experts(draw, each, 4) if len(each.ranks) > 1 and draw(_FLAG) else each
                for each in group.replicas
            ),
        )
        for group in plan.groups
    )
    return replace(plan, groups=groups)


def _tp_shards(draw: DrawFn, degree: int, model: ModelFingerprint) -> TpShards | None:
    """Any parts, also none for some ranks; equal ones are left out at times, where they are."""
    wholes = {
        "kv_groups": model.num_query_groups,
        "mlp_columns": model.ffn_hidden_size,
        "vocabulary_rows": model.vocab_size,
        "experts": model.num_experts,
    }
    if degree == 1:
        return None
    counts = {
        name: tuple(_parts(draw, whole, degree))
        for name, whole in wholes.items()
        if whole and (name == "experts" or whole % degree or draw(_FLAG))
    }
    return TpShards(**counts) if counts else None


def with_random_order(draw: DrawFn, plan: Plan) -> Plan:
    """The plan with what its order follows: times, and limits of all replicas or of none."""
    has_times = draw(_FLAG)
    has_limits = plan.schedule.name != "breadth_first" and draw(_FLAG)
    groups = []
    for number, group in enumerate(plan.groups):
        chunks = [plan.chunks[chunk].layers for chunk in plan.chunks_of_group(number)]
        layers = sum(stop - first for first, stop in chunks)
        most = _none_or_up_to(2 * layers * plan.global_batch_size)
        replicas = tuple(
            replace(
                replica,
                compute_s=tuple(draw(_COMPUTE_TIMES) for _ in chunks) if has_times else None,
                max_in_flight=(draw(most) or 1) if has_limits else None,
                max_delayed_wgrad=draw(most) if group.split_backward else None,
            )
            for replica in group.replicas
        )
        groups.append(replace(group, replicas=replicas))
    return replace(plan, groups=tuple(groups))


def _with_moves(draw: DrawFn, group: Group, may_offload_parameters: bool) -> Group:
    """The group with settings that change where things are and when, but no result."""
    moved = replace(group, **_moves(draw, may_offload_parameters))
    if len(group.replicas) == 1 or not draw(_FLAG):
        return moved
    replicas = tuple(
        replace(each, **_moves(draw, may_offload_parameters)) if draw(_FLAG) else each
        for each in group.replicas
    )
    return replace(moved, replicas=replicas)


def _moves(draw: DrawFn, may_offload_parameters: bool) -> dict[str, Any]:
    recompute = draw(_RECOMPUTES)
    offload = Offload(
        parameters=may_offload_parameters and draw(_FLAG),
        optimizer_state=draw(_FLAG),
        gradients=may_offload_parameters and draw(_FLAG),
        activations=draw(_FLAG),
    )
    return {"recompute": recompute, "offload": offload}


def _schedule(draw: DrawFn, names: tuple[ScheduleName, ...], with_parameters: bool) -> Schedule:
    name = draw(st.sampled_from(names))
    known = SCHEDULE_PARAMETERS[name] if with_parameters else {}
    return Schedule(name=name, parameters=draw(_parameters(name)) if known else {})


@cache
def _parameters(schedule: ScheduleName) -> SearchStrategy[dict[str, str]]:
    known = SCHEDULE_PARAMETERS[schedule]
    return st.fixed_dictionaries(
        {}, optional={key: st.sampled_from(values) for key, values in known.items()}
    )


def _number(draw: DrawFn, given: Integers | None, default: SearchStrategy[int]) -> int:
    return given if isinstance(given, int) else draw(default if given is None else given)


def _members(
    draw: DrawFn, max_world: int, min_groups: int, max_groups: int, max_ranks_per_replica: int
) -> list[list[tuple[int, ...]]]:
    """Deal shuffled ranks out to replicas, and these to groups: a list of replicas per group."""
    num_groups = draw(st.integers(min_groups, min(max_groups, max_world)))
    num_replicas = draw(st.integers(num_groups, max_world))
    spare = max_world - num_replicas
    sizes = []
    for _ in range(num_replicas):
        size = draw(st.integers(1, min(max_ranks_per_replica, 1 + spare)))
        spare -= size - 1
        sizes.append(size)
    ranks = iter(draw(_orders(sum(sizes))))
    replicas = iter([tuple(next(ranks) for _ in range(size)) for size in sizes])
    extras = _parts(draw, num_replicas - num_groups, num_groups)
    return [[next(replicas) for _ in range(1 + extra)] for extra in extras]


def _replicas(
    draw: DrawFn,
    members: list[tuple[int, ...]],
    batch: int,
    with_options: bool,
    *,
    halves: bool,
) -> tuple[Replica, ...]:
    """Share the batch out: some replicas may get nothing, the others different sizes and counts."""
    # Idle replicas are drawn apart from the shares so that they stay the exception.
    is_idle = draw(_idle(len(members)))
    if all(is_idle):
        is_idle[0] = False
    num_active = is_idle.count(False)
    least = 1 if num_active <= batch else 0
    shares = iter(_parts(draw, batch - least * num_active, num_active))
    weights = [draw(_SHARD_WEIGHTS) for _ in members]
    if not any(weights):
        weights[draw(st.integers(0, len(members) - 1))] = 1.0
    replicas = []
    for ranks, rests, weight in zip(members, is_idle, weights, strict=True):
        samples = 0 if rests else least + next(shares)
        size = draw(_micro_batch_sizes(samples))
        replicas.append(
            Replica(
                ranks=ranks,
                micro_batch_size=size,
                num_microbatches=samples // size,
                halved=_halved(draw, samples // size) if halves and size > 1 else None,
                shard_weight=weight,
                **_replica_options(draw, with_options),
            )
        )
    return tuple(replicas)


def without_halves(plan: Plan) -> Plan:
    """With all micro-batches whole."""
    groups = tuple(
        replace(group, replicas=tuple(replace(each, halved=None) for each in group.replicas))
        for group in plan.groups
    )
    return replace(plan, groups=groups)


def sizes_as_they_run(replica: Replica) -> list[int]:
    """Samples of a replica's micro-batches: the first and last so many in two halves."""
    size, count, found = replica.micro_batch_size, replica.num_microbatches, []
    first, last = (replica.halved.first, replica.halved.last) if replica.halved else (0, 0)
    for at in range(count):
        is_halved = at < first or count - at <= last
        found += [size - size // 2, size // 2] if is_halved else [size]
    return found


def _halved(draw: DrawFn, count: int) -> Halved | None:
    if not draw(_FLAG):
        return None
    first = draw(st.integers(0, min(2, count)))
    last = draw(st.integers(0, min(2, count - first)))
    return Halved(first=first, last=last, time_of_half=draw(st.sampled_from([0.5, 0.6, 1.0])))


@cache
def _idle(count: int) -> SearchStrategy[list[bool]]:
    return st.lists(st.sampled_from([False, False, False, True]), min_size=count, max_size=count)


@cache
def _orders(count: int) -> SearchStrategy[list[int]]:
    return st.permutations(range(count))


@cache
def _none_or_up_to(most: int) -> SearchStrategy[int | None]:
    return st.none() | st.integers(1, most)


@cache
def _micro_batch_sizes(samples: int) -> SearchStrategy[int]:
    """Sizes that divide `samples`; any size for a replica that runs none."""
    if samples == 0:
        return st.integers(1, 4)
    return st.sampled_from([size for size in range(1, samples + 1) if samples % size == 0])


def _chunks(
    draw: DrawFn, num_groups: int, num_layers: int, max_per_group: int
) -> tuple[Chunk, ...]:
    """Cut the layers into chunks, at least one for each group, in any order of the groups."""
    owners = list(range(num_groups))
    for group in range(num_groups):
        spare = num_layers - len(owners)
        owners += [group] * draw(st.integers(0, min(max_per_group - 1, spare)))
    order = draw(_orders(len(owners)))
    owners = [owners[place] for place in order]
    extras = _parts(draw, num_layers - len(owners), len(owners))
    chunks, first = [], 0
    for group, extra in zip(owners, extras, strict=True):
        chunks.append(Chunk(group=group, layers=(first, first + 1 + extra)))
        first += 1 + extra
    return with_random_transfers(draw, chunks)


def with_random_transfers(draw: DrawFn, chunks: Sequence[Chunk]) -> tuple[Chunk, ...]:
    """The chunks, with transfers between some of those of different groups."""
    found = [
        replace(chunk, transfer=draw(_TRANSFERS)) if chunk.group != after.group else chunk
        for chunk, after in pairwise(chunks)
    ]
    return (*found, chunks[-1])


def _parts(draw: DrawFn, total: int, count: int) -> list[int]:
    """Split `total` into `count` parts of 0 or more."""
    cuts = draw(_cuts(total, count - 1))
    edges = [0, *sorted(cuts), total]
    return [stop - start for start, stop in pairwise(edges)]


@cache
def _cuts(total: int, count: int) -> SearchStrategy[list[int]]:
    return st.lists(st.integers(0, total), min_size=count, max_size=count)


_MEMORY_SETTINGS: dict[str, SearchStrategy[Any]] = {
    "recompute": st.one_of(
        st.none(),
        st.builds(Recompute, mode=st.sampled_from(["none", "selective"])),
        st.builds(Recompute, mode=st.just("full"), num_layers=st.none() | st.integers(1, 4)),
    ),
    "offload": st.none()
    | st.builds(Offload, parameters=_FLAG, optimizer_state=_FLAG, activations=_FLAG),
}
_REPLICA_OPTIONS = {"region": st.none() | NAMES, **_MEMORY_SETTINGS}
_GROUP_OPTIONS = {
    "name": st.none() | NAMES,
    **_MEMORY_SETTINGS,
    "compute_dtype": st.sampled_from([None, "fp16", "bf16", "fp32"]),
    "grad_reduce_dtype": st.sampled_from([None, "bf16", "fp16"]),
}


def _replica_options(draw: DrawFn, with_options: bool) -> dict[str, Any]:
    """Settings of a replica's own."""
    if not with_options or not draw(_FLAG):
        return {}
    return {name: draw(values) for name, values in _REPLICA_OPTIONS.items()}


def _group_options(draw: DrawFn, with_options: bool) -> dict[str, Any]:
    if not with_options:
        return {}
    return {name: draw(values) for name, values in _GROUP_OPTIONS.items()}


_MODEL_OPTIONS = {
    **dict.fromkeys(
        (
            "hidden_size",
            "ffn_hidden_size",
            "num_attention_heads",
            "num_query_groups",
            "seq_length",
            "vocab_size",
        ),
        st.none() | st.integers(1, 200_000),
    ),
    "tied_embeddings": st.none() | _FLAG,
}


def _model_options(draw: DrawFn, with_options: bool) -> dict[str, Any]:
    if not with_options:
        return {}
    return {name: draw(values) for name, values in _MODEL_OPTIONS.items()}


def _plan_options(draw: DrawFn, with_options: bool, world_size: int) -> dict[str, Any]:
    if not with_options:
        return {}
    return {name: draw(values) for name, values in _options_of_world(world_size).items()}


@cache
def _options_of_world(world_size: int) -> dict[str, SearchStrategy[Any]]:
    def per_rank(entry: SearchStrategy[Any]) -> SearchStrategy[Any]:
        return st.none() | st.tuples(*[entry] * world_size)

    positive = st.none() | st.floats(min_value=0, exclude_min=True, allow_infinity=False)
    cluster = st.builds(ClusterFingerprint, name=st.none() | NAMES, gpu_kinds=per_rank(NAMES))
    predictions = st.builds(
        Predictions,
        iteration_s=positive,
        tokens_per_s=positive,
        peak_memory_bytes=per_rank(st.integers(0, 1 << 40)),
    )
    return {"cluster": st.none() | cluster, "predictions": st.none() | predictions}
