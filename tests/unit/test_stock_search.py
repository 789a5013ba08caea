"""Stock Megatron's layouts: the search finds the best of all, on all GPUs and on some."""

import dataclasses
import itertools
import math
from pathlib import Path

import pytest

from tests.topologies import node
from tests.unit.fake_costs import FakeMemory
from tests.unit.made_plans import plan_of, replica
from tests.unit.planner_cases import CaseCompute
from zorse_megatron.costs.communication import GraphComm
from zorse_megatron.costs.topology import Topology
from zorse_megatron.inputs.cluster_yaml import load_cluster, parse_cluster
from zorse_megatron.inputs.model import MODELS
from zorse_megatron.plan.plan import Chunk, ClusterFingerprint, Group, ModelFingerprint, Recompute
from zorse_megatron.planner.baselines.stock_best import (
    stock_at_best,
    stock_in_short,
    stock_on_all,
)
from zorse_megatron.planner.baselines.stock_costs import grid_estimates
from zorse_megatron.planner.baselines.stock_layouts import even_stages, grids, plan_of_grid, subsets
from zorse_megatron.planner.baselines.stock_search import framework_of
from zorse_megatron.planner.find_plan import find_plan
from zorse_megatron.planner.inputs.search_inputs import (
    Inputs,
    NodeLike,
    SearchSpace,
    make_inputs,
    on_nodes,
)
from zorse_megatron.planner.outcome import NoPlanError
from zorse_megatron.planner.simulate_plan import simulate_plan
from zorse_megatron.simulate.assumptions import STOCK_1F1B, STOCK_INTERLEAVED

SPEEDS = {"fast": 0.01, "middle": 0.017, "slow": 0.04}
KINDS = ("none", "full")


def cluster_of(*nodes, layers=6, batch=8, room=3.0, nic=2e5, fixed_s=0.002, most=2):
    """Small numbers: layers of 640 parameters, GPUs with `room` times their part of the model."""
    kinds = tuple(itertools.chain(*nodes))
    made = [
        node(
            f"n{number}",
            gpu_kinds=tuple(part),
            link_bytes_per_s=1e6,
            link_latency_s=1e-4,
            host_link_bytes_per_s=1e6,
            nic_bytes_per_s=nic,
            nic_latency_s=1e-3,
        )
        for number, part in enumerate(nodes)
    ]
    spec = Topology.of(tuple(made))
    memory = FakeMemory(embedding_count=300, head_count=300, boundary=100, head=200)
    whole = 18 * (layers * memory.layer_count + 600)
    return Inputs(
        spec=spec,
        compute=CaseCompute(sample_s=SPEEDS, fixed_s=fixed_s),
        memory=memory,
        comm=GraphComm(spec),
        by_dtype={},
        kinds=kinds,
        capacities_bytes=tuple(
            int(room * whole / len(kinds) * (1.5 if kind == "slow" else 1)) for kind in kinds
        ),
        host_bytes=(None,) * len(kinds),
        global_batch_size=batch,
        sequence_length=1,
        num_layers=layers,
        tied_embeddings=False,
        model=ModelFingerprint(num_layers=layers),
        cluster=ClusterFingerprint(gpu_kinds=kinds),
        space=SearchSpace(
            split_backward=False,
            schedules=("1f1b", "interleaved"),
            recompute=KINDS,
            offload=False,
            max_micro_batch_size=most,
        ),
        memory_margin=0.0,
        best_sizes=dict.fromkeys(SPEEDS, (1, 2, 4)),
    )


def arrangements(inputs):
    """Every set of GPUs in every order, nodes whole, as inputs; those that look alike once."""
    seen = set()
    for used in itertools.product((False, True), repeat=inputs.world_size):
        nodes = [
            [rank for rank in inputs.spec.ranks_of(number) if used[rank]]
            for number in range(len(inputs.spec.nodes))
        ]
        for order in itertools.permutations([each for each in nodes if each]):
            for inner in itertools.product(*(itertools.permutations(each) for each in order)):
                look = tuple(tuple(inputs.kinds[rank] for rank in each) for each in inner)
                if look and look not in seen:
                    seen.add(look)
                    likes = [
                        NodeLike(node=inputs.spec.node_of(each[0]), ranks=each) for each in inner
                    ]
                    yield on_nodes(inputs, likes)


def compositions(total, parts):
    for cuts in itertools.combinations(range(1, total), parts - 1):
        yield tuple(b - a for a, b in itertools.pairwise((0, *cuts, total)))


def every_layout(inputs):
    """(least time, plan, framework) of each layout that stock's argument check takes."""
    world, batch, layers = inputs.world_size, inputs.global_batch_size, inputs.num_layers
    for stages, virtual in itertools.product(range(1, world + 1), range(1, layers + 1)):
        width, rest = divmod(world, stages)
        if rest or stages * virtual > layers or (virtual > 1 and stages == 1):
            continue
        for size in range(1, inputs.space.max_micro_batch_size + 1):
            count, rest = divmod(batch, width * size)
            if rest or (virtual > 1 and count % stages):
                continue
            for split in compositions(layers, stages * virtual):
                for again in range(max(split) + 1):
                    yield _layout(inputs, split, stages, size, count, again)


def _layout(inputs, split, stages, size, count, again):  # noqa: PLR0917
    width = inputs.world_size // stages
    starts = [0, *itertools.accumulate(split)]
    is_interleaved = len(split) > stages
    plan = plan_of(
        *(
            Group(
                replicas=tuple(
                    replica(rank, size=size, count=count)
                    for rank in range(stage * width, (stage + 1) * width)
                ),
                recompute=Recompute(mode="full", num_layers=again) if again else None,
            )
            for stage in range(stages)
        ),
        schedule="interleaved" if is_interleaved else "1f1b",
    )
    chunks = tuple(
        Chunk(group=at % stages, layers=span) for at, span in enumerate(itertools.pairwise(starts))
    )
    plan = dataclasses.replace(plan, model=inputs.model, chunks=chunks)
    framework = STOCK_INTERLEAVED if is_interleaved else STOCK_1F1B
    return _least_s(inputs, split, stages, size, count, again), plan, framework


def _least_s(inputs, split, stages, size, count, again):  # noqa: PLR0917
    """A GPU computes all of its micro-batches, after the first and before the last one has been in
    the first virtual stages of all GPUs before it.
    """
    width, compute = inputs.world_size // stages, inputs.compute

    def chunk_s(at, kind):
        layer, head = compute.layer(kind, size), compute.head(kind, size)
        one_s = split[at] * (layer.forward_s + layer.backward_s)
        one_s += min(again, split[at]) * compute.recompute_s(kind, size, "full")
        if at == 0:
            one_s += 2 * compute.embedding(kind, size).forward_s
        if at == len(split) - 1:
            one_s += head.forward_s + head.backward_s
        return one_s

    least_s = 0.0
    for pipeline in {inputs.kinds[column::width] for column in range(width)}:
        before_s = 0.0
        for stage, kind in enumerate(pipeline):
            each_s = [chunk_s(at, kind) for at in range(stage, len(split), stages)]
            least_s = max(least_s, before_s + count * sum(each_s))
            before_s += each_s[0]
    return least_s


def fastest_by_trying(inputs):
    """Iteration of the best layout of all, and how many there are."""
    rows, best_s = [], math.inf
    for part in arrangements(inputs):
        rows += [
            (least_s, number, part, plan, fw)
            for number, (least_s, plan, fw) in enumerate(every_layout(part))
        ]
    for least_s, _, part, plan, framework in sorted(rows, key=lambda row: row[0]):
        if least_s >= best_s:
            break
        result = simulate_plan(part, plan, framework=framework, merge_equal_ranks=True)
        peaks = zip(result.peak_memory_bytes, part.capacities_bytes, strict=True)
        if all(peak <= capacity for peak, capacity in peaks):
            assert result.iteration_s >= least_s
            best_s = min(best_s, result.iteration_s)
    return best_s, len(rows)


F, M, S = "fast", "middle", "slow"
CASES = {
    "two nodes": cluster_of((F, F), (S, S)),
    "memory is short": cluster_of((F, F), (M, M), room=1.6),
    "one node of two kinds": cluster_of((F, M, M, S)),
    "slow network": cluster_of((F, F), (M, M), nic=4e4),
    "five GPUs": cluster_of((F, F, F), (M, M), batch=12),
    "three nodes": cluster_of((F, F), (M,), (S,), batch=12),
    "six GPUs": cluster_of((F, F, F), (S, S, S), batch=12, most=1),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_search_finds_the_best_of_all_layouts(name):
    inputs = CASES[name]
    best_s, number = fastest_by_trying(inputs)
    found = stock_at_best(inputs).best
    assert number > 1000
    assert found.fitting.iteration_s == pytest.approx(best_s, rel=1e-9)


@pytest.mark.slow
def test_the_best_layout_is_no_slower_than_even_ones():
    """One fast GPU and three slow ones."""
    nodes = "[{name: a, gpus: 1 x H100-80, NICS}, {name: b, gpus: 3 x L4, NICS}]"
    inputs = make_inputs(
        parse_cluster(f"nodes: {nodes.replace('NICS', 'nics: 10 Gb/s')}".encode()),
        dataclasses.replace(MODELS["llama-3b"], seq_length=2048),
        None,
        global_batch_size=32,
        dtype="float16",
    )
    best, even = stock_at_best(inputs).best.fitting, stock_on_all(inputs).fitting
    assert best.iteration_s < even.iteration_s / 2
    # The fast GPU is last, with most of the layers.
    assert best.inputs.kinds[-1] == "H100-80"
    assert best.grid.layers_of(best.grid.stages - 1) > max(map(best.grid.layers_of, range(3)))


# Even layouts.

TWO_NODES = load_cluster(Path(__file__).parents[2] / "examples" / "two-node-lab.yaml")
FOUR_GPUS = parse_cluster(
    b"nodes: [{gpus: 2 x A6000, nics: 100 Gb/s}, {gpus: 2 x V100-16, nics: 100 Gb/s}]"
)
SMALL = dataclasses.replace(MODELS["llama-3b"], num_layers=8)


def make(cluster=TWO_NODES, batch=8, layers=8):
    return make_inputs(
        cluster,
        dataclasses.replace(SMALL, num_layers=layers),
        None,
        global_batch_size=batch,
        dtype="float16",
        space=SearchSpace(offload=False, split_backward=False),
    )


def without_tp(inputs):
    space = dataclasses.replace(inputs.space, max_tensor_parallel=1)
    return dataclasses.replace(inputs, space=space)


def three_nodes(gpus):
    text = "\n".join(f"  - {{name: n{n}, gpus: {g}, nics: 25 Gb/s}}" for n, g in enumerate(gpus))
    return parse_cluster(f"nodes:\n{text}".encode())


def test_stages_may_count_embedding_and_head_as_layers():
    assert even_stages(8, 4) == ((2, 2, 2, 2), (False, False))
    assert even_stages(26, 4) == ((6, 7, 7, 6), (True, True))
    assert even_stages(7, 4) == ((2, 2, 2, 1), (False, True))
    assert even_stages(26, 1) == ((26,), (False, False))
    assert even_stages(26, 8) is None
    assert even_stages(2, 4) is None  # the first stage would have none


@pytest.mark.slow
@pytest.mark.parametrize(("cluster", "layers"), [(TWO_NODES, 8), (FOUR_GPUS, 10)])
def test_the_best_layout_is_the_fastest_that_fits(cluster, layers):
    inputs = make(cluster, layers=layers)
    every = []
    for grid in grids(inputs):
        plan = plan_of_grid(inputs, grid)
        costs_of_workload = simulate_plan(inputs, plan, framework=framework_of(grid))
        peaks = zip(costs_of_workload.peak_memory_bytes, inputs.capacities_bytes, strict=True)
        if all(peak <= capacity for peak, capacity in peaks):
            every.append((costs_of_workload.iteration_s, grid))
    best = stock_on_all(inputs, most_computations=60_000).fitting
    assert (best.iteration_s, best.grid) == min(every, key=lambda each: each[0])
    assert len({grid.width for _, grid in every}) > 1


@pytest.mark.slow
@pytest.mark.parametrize("layers", [8, 10])
def test_in_short_stock_is_hardly_slower(layers):
    inputs = make(FOUR_GPUS, layers=layers)
    best = stock_on_all(inputs, most_computations=60_000).fitting
    assert stock_in_short(inputs).fitting.iteration_s <= 1.04 * best.iteration_s


def test_what_is_sent_decides_which_layout_is_simulated_first():
    """Over a slow link, layouts that send much cost more than they compute."""
    pair = "nodes: [{name: a, count: 2, gpus: 2 x A100-40, nics: NICS}]"
    fast, slow = (
        make(parse_cluster(pair.replace("NICS", nics).encode())) for nics in ("400 Gb/s", "1 Gb/s")
    )
    near, far = (
        {each.grid: each.iteration_s for each in grid_estimates(inputs)} for inputs in (fast, slow)
    )
    across = [grid for grid in near if grid.stages > 1 or grid.width > 2]
    assert all(far[grid] > 1.5 * near[grid] for grid in across)
    first = stock_on_all(slow, most_computations=1).fitting
    best_near = stock_on_all(fast, most_computations=1).fitting.grid
    plan = plan_of_grid(slow, best_near)
    result = simulate_plan(slow, plan, framework=framework_of(best_near))
    assert first.iteration_s < 0.5 * result.iteration_s


def test_memory_is_told_from_divisibility():
    small = dataclasses.replace(make(), capacities_bytes=(2**30,) * 8)
    found = stock_on_all(small)
    assert found.fitting is None
    assert found.layout.description.endswith("TP 4 PP 2 DP 1, micro-batches of 1, recompute full")
    assert found.reason.startswith("memory: TP 4 PP 2 DP 1")
    assert "of 1.0 GiB on rank " in found.reason
    odd = stock_on_all(without_tp(make(batch=7, layers=9)))
    assert odd.layout is None
    assert odd.reason == (
        "divisibility: 8 GPUs make 1, 2, 4 or 8 stages, of which 9 layers can be split evenly into "
        "1 or 2; data parallelism would then be 8 (PP 1), 4 (PP 2), and none of these divides a "
        "batch of 7"
    )
    with pytest.raises(NoPlanError, match="divisibility: 8 GPUs make"):
        find_plan(without_tp(make(batch=7, layers=7)), strategy="stock")


@pytest.mark.slow
def test_subsets_of_the_gpus_are_tried():
    seven = make(three_nodes(["2 x A100-40", "4 x A10G", "1 x T4"]))
    tried = set(subsets(seven))
    assert {(0, 1), (0, 1, 2, 3, 4, 5), (0, 1, 2, 3), (2, 3, 4, 5), (0, 1, 6)} <= tried
    assert tuple(range(7)) not in tried
    odd = dataclasses.replace(seven, global_batch_size=15)
    assert stock_on_all(odd).reason and not stock_in_short(odd).reason
    # Two fast GPUs with a slow one far behind: stock is faster without it.
    slow = make(three_nodes(["2 x A100-40", "2 x T4"]))
    alone = stock_in_short(slow).fitting
    assert alone.ranks == (0, 1)
    assert alone.iteration_s < stock_on_all(slow).layout.iteration_s
    only = make(three_nodes(["2 x A100-40"]))
    assert alone.iteration_s == stock_on_all(only).layout.iteration_s
