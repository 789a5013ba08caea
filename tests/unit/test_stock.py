"""What stock Megatron is: its even layouts, on all GPUs and on the best of them."""

import dataclasses
from pathlib import Path

import pytest

from zorse_megatron.inputs.cluster_yaml import load_cluster, parse_cluster
from zorse_megatron.inputs.model import MODELS
from zorse_megatron.planner.baselines.stock_best import stock_in_short, stock_on_all, stock_on_best
from zorse_megatron.planner.baselines.stock_costs import grid_estimates
from zorse_megatron.planner.baselines.stock_layouts import even_stages, grids, plan_of_grid, subsets
from zorse_megatron.planner.baselines.stock_search import framework_of
from zorse_megatron.planner.find_plan import find_plan
from zorse_megatron.planner.inputs.search_inputs import SearchSpace, make_inputs
from zorse_megatron.planner.outcome import NoPlanError
from zorse_megatron.planner.simulate_plan import simulate_plan

CLUSTER = load_cluster(Path(__file__).parents[2] / "examples" / "two-node-lab.yaml")
MODEL = dataclasses.replace(MODELS["llama-3b"], num_layers=8)


def make(cluster=CLUSTER, batch=16, layers=8):
    return make_inputs(
        cluster,
        dataclasses.replace(MODEL, num_layers=layers),
        None,
        global_batch_size=batch,
        dtype="float16",
        space=SearchSpace(offload=False),
    )


def without_sets(inputs):
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
@pytest.mark.parametrize("layers", [8, 10])
def test_the_best_layout_is_the_fastest_that_fits(layers):
    inputs = make(layers=layers)
    every = []
    for grid in grids(inputs):
        plan = plan_of_grid(inputs, grid)
        costs_of_workload = simulate_plan(inputs, plan, framework=framework_of(grid))
        peaks = zip(costs_of_workload.peak_memory_bytes, inputs.capacities_bytes, strict=True)
        if all(peak <= capacity for peak, capacity in peaks):
            every.append((costs_of_workload.iteration_s, grid))
    best = stock_on_all(inputs).fitting
    assert (best.iteration_s, best.grid) == min(every, key=lambda each: each[0])
    assert len({grid.width for _, grid in every}) > 1


@pytest.mark.slow
@pytest.mark.parametrize("layers", [8, 10])
def test_in_short_stock_is_hardly_slower(layers):
    inputs = make(layers=layers)
    both = [stock_on_all(inputs).fitting, stock_on_best(inputs).fitting]
    best_s = min(each.iteration_s for each in both)
    assert best_s <= stock_in_short(inputs).fitting.iteration_s <= 1.04 * best_s


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
    odd = stock_on_all(without_sets(make(batch=7, layers=9)))
    assert odd.layout is None
    assert odd.reason == (
        "divisibility: 8 GPUs make 1, 2, 4 or 8 stages, of which 9 layers can be split evenly into "
        "1 or 2; data parallelism would then be 8 (PP 1), 4 (PP 2), and none of these divides a "
        "batch of 7"
    )
    with pytest.raises(NoPlanError, match="divisibility: 8 GPUs make"):
        find_plan(without_sets(make(batch=7, layers=7)), strategy="stock")


@pytest.mark.slow
def test_subsets_of_the_gpus_are_tried():
    seven = make(three_nodes(["2 x A100-40", "4 x A10G", "1 x T4"]))
    tried = set(subsets(seven))
    assert {(0, 1), (0, 1, 2, 3, 4, 5), (0, 1, 2, 3), (2, 3, 4, 5), (0, 1, 6)} <= tried
    assert tuple(range(7)) not in tried
    assert stock_on_all(make(three_nodes(["2 x A100-40", "4 x A10G", "1 x T4"]), batch=15)).reason
    assert stock_on_best(seven).fitting is not None
    # Two fast GPUs with a slow one far behind: stock is faster without it.
    slow = make(three_nodes(["2 x A100-40", "2 x T4"]))
    alone = stock_on_best(slow).fitting
    assert alone.ranks == (0, 1)
    assert alone.iteration_s < stock_on_all(slow).layout.iteration_s
    only = make(three_nodes(["2 x A100-40"]))
    assert alone.iteration_s == stock_on_all(only).layout.iteration_s
