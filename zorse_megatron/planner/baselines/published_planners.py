"""Baselines `zorse-paper` and `cephalo`: published planners, on our cost models.

Groups by SPLIT on the complete graph of GPUs for every k, ordered by descending bandwidth inside;
layers in proportion to the groups' speed; one micro-batch size for all, counts in proportion to
speed; ministages round robin; every layer recomputed; equal shards. Micro-batch size and number of
ministages are enumerated. Boundary activations wait in the host where they do not fit otherwise.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, islice
from operator import itemgetter

import networkx as nx
import numpy as np

from zorse_megatron.costs.topology import Routes, Topology, attachment, numbered
from zorse_megatron.plan.plan import Group, Plan, Recompute, Replica, Schedule
from zorse_megatron.planner.build_plan import chunks_of, offload_setting
from zorse_megatron.planner.closed_form.candidate import Candidate, Estimate
from zorse_megatron.planner.closed_form.device_groups import (
    DeviceGroup,
    MemorySettings,
    ReplicaClass,
    ReplicaShare,
    Stage,
    StagePosition,
    best_split,
    layers_per_s,
)
from zorse_megatron.planner.closed_form.estimator import Estimator
from zorse_megatron.planner.evaluate import Evaluation, Evaluator, best_first
from zorse_megatron.planner.groupings.graph_cuts import SplitStep
from zorse_megatron.planner.groupings.pools import hardware_key, normalised
from zorse_megatron.planner.inputs.search_inputs import Inputs

_SIMULATED_OF_ZORSE = 5
_TRIED = 12
_SIZES = (1, 2, 4, 8)
_MINISTAGES = (1, 2, 3, 4, 6, 8)


def zorse_paper_plans(evaluator: Evaluator) -> list[Evaluation]:
    """Evaluations of the best plans that fit, fastest first."""
    found = sorted(_estimated_plans(evaluator.estimator), key=itemgetter(0))
    tried = (evaluator.evaluate_plan(plan) for _, plan in found[:_TRIED])
    return _best_first(tried, _SIMULATED_OF_ZORSE)


def _best_first(tried: Iterable[Evaluation | None], most: int) -> list[Evaluation]:
    """The first so many that fit; later ones are not tried."""
    return best_first(list(islice((each for each in tried if each and each.fits), most)))


def _estimated_plans(estimator: Estimator) -> Iterator[tuple[float, Plan]]:
    """Yield plans, each after the seconds that an iteration is estimated to take."""
    inputs = estimator.inputs
    most = min(len(inputs.spec.nodes), inputs.num_layers, inputs.space.max_groups or 64)
    for step in paper_groupings(inputs.spec, most):
        members = [estimator.device_groups.of(group) for group in step.grouping]
        order = sorted(
            members,
            key=lambda device_group: (-_bandwidth(inputs, device_group), device_group.ranks),
        )
        for size in inputs.space.sizes(_SIZES):
            if inputs.global_batch_size % size:
                continue
            layers = _proportional(
                inputs.num_layers,
                [layers_per_s(inputs, t, (size,) * len(t.gpu_classes)) for t in order],
            )
            if layers is None:
                continue
            for ministages in _MINISTAGES:
                if ministages <= max(layers):
                    yield from _estimated_plan(estimator, order, layers, size, ministages)


def _bandwidth(inputs: Inputs, device_group: DeviceGroup) -> float:
    """Mean over pairs of a few of its ranks."""
    pairs = list(combinations(device_group.ranks[:: max(1, len(device_group.ranks) // 8)], 2))
    if not pairs:
        return math.inf
    size = 10**8
    return sum(size / inputs.comm.transfer_s(*pair, size) for pair in pairs) / len(pairs)


def _proportional(num_layers: int, speeds: Sequence[float]) -> list[int] | None:
    """Rounded to whole layers by largest remainder, one at least; None with too many groups."""
    if len(speeds) > num_layers:
        return None
    exact = [num_layers * speed / sum(speeds) for speed in speeds]
    layers = [max(1, math.floor(part)) for part in exact]
    while sum(layers) < num_layers:
        layers[max(range(len(layers)), key=lambda i: exact[i] - layers[i])] += 1
    while sum(layers) > num_layers:
        rest = [i for i, count in enumerate(layers) if count > 1]
        layers[min(rest, key=lambda i: exact[i] - layers[i])] -= 1
    return layers


def _estimated_plan(
    estimator: Estimator, order: Sequence[DeviceGroup], layers: list[int], size: int, chunks: int
) -> Iterator[tuple[float, Plan]]:
    """The plan with so many ministages (`chunks`); none where it does not fit."""
    cost_model, inputs, groups = estimator.cost_model, estimator.inputs, list[Group]()
    busy_s = fill_s = 0.0
    for at, (device_group, count) in enumerate(zip(order, layers, strict=True)):
        position = StagePosition(
            is_first=at == 0,
            is_last=at == len(order) - 1,
            in_flight_limit=0.0,
            schedule="breadth_first",
            num_chunks=chunks,
        )
        stage = Stage(device_group, count, (size,) * len(device_group.gpu_classes), position)
        shares = _shares(inputs, estimator, stage)
        settings = None if shares is None else _fitting(estimator, stage, shares)
        if shares is None or settings is None:
            return
        passes = cost_model.passes(stage, stage.alike(settings))
        kinds = zip(device_group.gpu_classes, passes, strict=True)
        busy_s = max(
            busy_s,
            *(shares[rank].num_microbatches * p.both_s for c, p in kinds for rank in c.ranks),
        )
        fill_s += max(each.both_s for each in passes) / stage.num_chunks
        groups.append(_even_group(inputs, device_group.ranks, shares, settings))
    plan = Plan(
        schema_version=2,
        global_batch_size=inputs.global_batch_size,
        model=inputs.model,
        groups=tuple(groups),
        chunks=chunks_of(layers, chunks),
        schedule=Schedule(name="breadth_first"),
        cluster=inputs.cluster,
    )
    yield busy_s + fill_s, plan


def _even_group(
    inputs: Inputs,
    ranks: Sequence[int],
    shares: Mapping[int, ReplicaShare],
    settings: MemorySettings,
) -> Group:
    """Equal shards, and all layers recomputed."""
    return Group(
        replicas=tuple(
            Replica(
                ranks=(rank,),
                micro_batch_size=shares[rank].micro_batch_size,
                num_microbatches=shares[rank].num_microbatches,
                shard_weight=1.0,
            )
            for rank in ranks
        ),
        recompute=Recompute(mode="full"),
        offload=offload_setting(settings),
        compute_dtype=inputs.dtype_of(ranks),
    )


def _shares(inputs: Inputs, estimator: Estimator, stage: Stage) -> dict[int, ReplicaShare] | None:
    """Rank -> its part of the batch, in proportion to speed; None: it cannot be divided so."""
    settings = MemorySettings(mode="full", recomputed=stage.num_layers)
    passes = estimator.cost_model.passes(stage, stage.alike(settings))
    classes = [
        ReplicaClass(count=len(gpu_class.ranks), times_s={size: each.both_s})
        for gpu_class, size, each in zip(
            stage.device_group.gpu_classes, stage.sizes, passes, strict=True
        )
    ]
    split = best_split(inputs.global_batch_size, classes)
    if split is None:
        return None
    rows = zip(stage.device_group.gpu_classes, split, strict=True)
    return {
        rank: one for gpu_class, row in rows for rank, one in zip(gpu_class.ranks, row, strict=True)
    }


def _fitting(
    estimator: Estimator, stage: Stage, shares: Mapping[int, ReplicaShare]
) -> MemorySettings | None:
    """Boundary activations in the host only where they must; None where it does not fit at all."""
    memory, gpu_classes = estimator.cost_model.memory, stage.device_group.gpu_classes
    for offloads in (False, True) if estimator.inputs.space.offload else (False,):
        settings = MemorySettings(
            mode="full", recomputed=stage.num_layers, offload_activations=offloads
        )
        share = memory.shared_bytes(stage, settings) / len(stage.device_group.ranks)
        if all(
            share
            + memory.local_bytes(
                stage,
                settings,
                shares[rank].micro_batch_size,
                shares[rank].num_microbatches,
                gpu_class.kind,
            )
            <= gpu_class.capacity_bytes
            for gpu_class in gpu_classes
            for rank in gpu_class.ranks
        ):
            return settings
    return None


# SPLIT on the complete graph of GPUs, as in the Zorse paper (MLSys 2026, planner, phase 1).
#
# This is the baseline strategy `zorse-paper`, kept as it is: vertices are GPUs, the weight of a
# pair is the bandwidth between the two when all else is idle, so a NIC that eight GPUs share is
# counted for every pair. The authors' code tries k = 1 to the number of nodes. Its cuts peel off
# single GPUs where a node's inner links are slow: on such a graph that is the cheapest cut.
#
# The cut is exact and yet cheap, because a cheapest cut never halves a class of twins. Let x of the
# n GPUs of a node lie on one side. The cut's weight is concave in x (x (n - x) times the inner
# bandwidth, plus something linear), so the least is at an end of what is allowed: the node stays
# whole, or a single GPU goes. The same holds for equal nodes as wholes. What remains are cuts
# between classes of equal nodes (Stoer-Wagner on the graph of classes), one node, and one GPU.


_Piece = dict[int, tuple[int, ...]]
"""Ranks of one component on each of its nodes."""


def pair_bytes_per_s(routes: Routes, first: int, second: int) -> float:
    """Weight of the edge between two GPUs."""
    return routes.route(first, second).bytes_per_s


def paper_groupings(spec: Topology, max_groups: int | None = None) -> Iterator[SplitStep]:
    """Yield the groupings for k = 1, 2, ... up to `max_groups` (default: the number of nodes).

    O(k * (nodes + classes^3)), where a class is all that is left of equal nodes on one switch.
    """
    cutter = _Cutter(spec)
    pieces: list[_Piece] = [{i: tuple(spec.ranks_of(i)) for i in range(len(spec.nodes))}]
    cuts = [cutter.cheapest(pieces[0])]
    total = 0.0
    yield _step(pieces, total)
    for _ in range(1, min(max_groups or len(spec.nodes), spec.num_gpus)):
        number = min(range(len(pieces)), key=lambda i: cuts[i].weight)
        side = cuts[number].side
        total += cuts[number].weight
        pieces.append(side)
        pieces[number] = _without(pieces[number], side)
        cuts.append(cutter.cheapest(side))
        cuts[number] = cutter.cheapest(pieces[number])
        yield _step(pieces, total)


@dataclass(frozen=True, kw_only=True)
class _Peel:
    """A cut of a piece: its weight, and what goes."""

    weight: float
    side: _Piece


def _step(pieces: list[_Piece], total: float) -> SplitStep:
    ranks = ([rank for on_node in piece.values() for rank in on_node] for piece in pieces)
    return SplitStep(grouping=normalised(ranks), cut_bytes_per_s=total)


def _without(piece: _Piece, side: _Piece) -> _Piece:
    rest = {
        node: tuple(rank for rank in ranks if rank not in side.get(node, ()))
        for node, ranks in piece.items()
    }
    return {node: ranks for node, ranks in rest.items() if ranks}


class _Cutter:
    """Finds the cheapest cut of a piece of the complete graph."""

    def __init__(self, spec: Topology) -> None:
        self.spec = spec
        self.routes = Routes(spec)
        self._kind_of = numbered((attachment(node), *hardware_key(node)) for node in spec.nodes)

    def cheapest(self, piece: _Piece) -> _Peel:
        """The cheapest cut; of infinite weight if there is but one GPU."""
        classes: dict[tuple[int, int], list[int]] = {}
        for node in sorted(piece):
            classes.setdefault((self._kind_of[node], len(piece[node])), []).append(node)
        members = list(classes.values())
        inner, between = self._weights(members)
        sizes = np.array([len(piece[nodes[0]]) for nodes in members], dtype=float)
        counts = np.array([len(nodes) for nodes in members], dtype=float)
        # What one GPU of each class has to GPUs of other nodes, its own class included.
        outward = between @ (sizes * counts) - np.diag(between) * sizes
        cuts = [
            *_class_cut(piece, members, between, sizes * counts),
            *_one_node(piece, members, sizes * outward),
            *_one_gpu(piece, members, (sizes - 1) * inner + outward),
        ]
        return min(cuts, key=lambda cut: cut.weight, default=_Peel(weight=float("inf"), side={}))

    def _weights(self, members: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
        """Bandwidth of pairs inside a node of each class, and of pairs between nodes."""
        inner = np.array([self._inner(nodes[0]) for nodes in members])
        between = np.zeros((len(members), len(members)))
        for i, first in enumerate(members):
            for j, second in enumerate(members[: i + 1]):
                # Two nodes of one class are on the same switch.
                pair = (first[0], second[0]) if i != j else (first[0], first[-1])
                if pair[0] != pair[1]:
                    ranks = (self.spec.first_ranks[node] for node in pair)
                    between[i, j] = between[j, i] = pair_bytes_per_s(self.routes, *ranks)
        return inner, between

    def _inner(self, node: int) -> float:
        ranks = self.spec.ranks_of(node)
        return pair_bytes_per_s(self.routes, *ranks[:2]) if len(ranks) > 1 else 0.0


def _class_cut(
    piece: _Piece, members: list[list[int]], between: np.ndarray, num_gpus: np.ndarray
) -> Iterator[_Peel]:
    if len(members) > 1:
        weights = between * np.outer(num_gpus, num_gpus)
        np.fill_diagonal(weights, 0.0)
        weight, sides = nx.stoer_wagner(nx.from_numpy_array(weights))
        nodes = [node for number in min(sides, key=len) for node in members[number]]
        yield _Peel(weight=weight, side={node: piece[node] for node in nodes})


def _one_node(piece: _Piece, members: list[list[int]], weights: np.ndarray) -> Iterator[_Peel]:
    if len(piece) > 1:
        best = int(np.argmin(weights))
        node = members[best][0]
        yield _Peel(weight=float(weights[best]), side={node: piece[node]})


def _one_gpu(piece: _Piece, members: list[list[int]], weights: np.ndarray) -> Iterator[_Peel]:
    if sum(map(len, piece.values())) > 1:
        best = int(np.argmin(weights))
        node = members[best][0]
        yield _Peel(weight=float(weights[best]), side={node: piece[node][:1]})


# Baseline `cephalo`: one group of all GPUs, as Cephalo trains (ICS 2025), on our cost models.
#
# Uneven micro-batch sizes and counts, training state sharded by free memory, layered accumulation:
# every layer is gathered once per pass, runs all micro-batches, and is reduced. Every layer is
# recomputed; what is kept waits in the host only where it does not fit.


_LEVELS = (1, 2, 4, 8)
_LAYERS_PER_CHUNK = (1, 2, 4)
_SIMULATED_OF_CEPHALO = 3


def cephalo_plans(evaluator: Evaluator) -> list[Evaluation]:
    """Evaluations of the best plans that fit, fastest first."""
    inputs = evaluator.inputs
    world = evaluator.estimator.device_groups.of(tuple(range(inputs.world_size)))
    found: list[Estimate] = []
    for layers in _LAYERS_PER_CHUNK:
        for level in inputs.space.sizes(_LEVELS):
            candidate = Candidate(
                device_groups=(world,),
                levels=(min(level, inputs.global_batch_size),),
                schedule="breadth_first",
                num_chunks=-(-inputs.num_layers // layers),
            )
            found += evaluator.estimator.best(candidate)
    found.sort(key=lambda each: each.iteration_s)
    return _best_first((_fitted(evaluator, each) for each in found), _SIMULATED_OF_CEPHALO)


def cephalo_inputs(inputs: Inputs) -> Inputs:
    """The same with its search space: it always recomputes every layer."""
    return replace(inputs, space=replace(inputs.space, recompute=("full",)))


def _fitted(evaluator: Evaluator, estimate: Estimate) -> Evaluation | None:
    """Simulate; once more with what was missing kept free."""
    for _ in range(3):
        evaluation = evaluator.evaluate(estimate)
        if evaluation is not None and evaluation.fits:
            return evaluation
        missing = max(evaluation.overflow_bytes) if evaluation is not None else 0
        more = _with_reserve(evaluator.estimator, estimate, missing)
        if more is None:
            return None
        estimate = more
    return None


def _with_reserve(estimator: Estimator, estimate: Estimate, missing: int) -> Estimate | None:
    before = (estimate.candidate.reserves or (0,))[0]
    reserve = before + missing + min(estimator.inputs.capacities_bytes) // 200
    candidate = replace(estimate.candidate, reserves=(reserve,))
    return estimator.estimate(candidate, estimate.layers)
