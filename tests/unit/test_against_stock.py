"""A plan beside stock Megatron's best layouts, as `zorse explain` says it."""

import dataclasses
import re
from functools import cache

import pytest

from tests.unit.cli_samples import runner_in
from zorse_megatron.inputs.cluster_yaml import parse_cluster
from zorse_megatron.inputs.model import MODELS
from zorse_megatron.plan.plan import Recompute
from zorse_megatron.planner import find_plan as find_plan_module
from zorse_megatron.planner.baselines import stock_best
from zorse_megatron.planner.baselines.stock_best import Stock, StockAtBest, stock_on_all
from zorse_megatron.planner.baselines.stock_layouts import grids, plan_of_grid
from zorse_megatron.planner.explain import explain
from zorse_megatron.planner.explanation import against_stock, stock_sentence
from zorse_megatron.planner.inputs.search_inputs import make_inputs

LAB = parse_cluster(b"nodes: [{gpus: 2 x A6000, nics: 100 Gb/s}, {gpus: 2 x T4, nics: 100 Gb/s}]")
MODEL = dataclasses.replace(MODELS["llama-1b"], seq_length=512, num_layers=4)
NODES = (range(2), range(2, 4))
NONE = Stock(layout=None, reason="memory: too little")


@cache
def lab():
    return make_inputs(LAB, MODEL, None, global_batch_size=8, dtype="float16")


@cache
def even():
    return stock_on_all(lab(), most_computations=1)


def faster(factor):
    """As if there were a layout that is so many times as fast as the even one."""
    layout = dataclasses.replace(even().layout, iteration_s=even().layout.iteration_s / factor)
    return StockAtBest(even=even(), best=Stock(layout=layout, reason=""))


def test_one_sentence_has_all_three():
    layout = even().layout
    found = explain(lab(), layout.plan, stock=faster(0.8))
    ours_s = found.iteration_s
    best = faster(layout.iteration_s / (1.25 * ours_s))
    found = explain(lab(), layout.plan, stock=best)
    (told,) = [each for each in found.sentences if each.startswith("Stock Megatron takes ")]
    seconds = re.findall(r"([\d.]+) (m?s)\b", told)
    assert [float(n) / (1000 if unit == "ms" else 1) for n, unit in seconds] == [
        pytest.approx(1.25 * ours_s, rel=0.005),
        pytest.approx(layout.iteration_s, rel=0.005),
    ]
    assert ", 25 % longer, " in told and f" in its best layout ({layout.description})" in told
    assert not any(each.startswith("Stock") for each in explain(lab(), layout.plan).sentences)


def test_a_plan_that_is_a_layout_of_stock_lacks_nothing():
    for grid in grids(lab()):
        found = against_stock(plan_of_grid(lab(), grid), NODES, faster(1.0))
        assert found.lacks == ()
    told = stock_sentence(found, 2 * found.best_s)
    assert ", 50 % shorter, " in told and told.endswith(". It could run a layout like this plan's.")


def test_what_stock_lacks_is_named():
    grid = next(each for each in grids(lab()) if (each.stages, each.width) == (2, 2))
    plan = plan_of_grid(lab(), grid)
    first, second = plan.groups
    one, other = first.replicas
    lacks = {
        "one micro-batch size": dataclasses.replace(
            first, replicas=(dataclasses.replace(one, micro_batch_size=7), other)
        ),
        "equal shards": dataclasses.replace(
            first, replicas=(dataclasses.replace(one, shard_weight=0.5), other)
        ),
        "as many micro-batches on each replica": dataclasses.replace(
            first,
            replicas=(
                dataclasses.replace(one, num_microbatches=one.num_microbatches + 1),
                other,
            ),
        ),
        "as many replicas in each stage": dataclasses.replace(first, replicas=(one,)),
        "one recompute setting": dataclasses.replace(first, recompute=Recompute(mode="selective")),
        "one compute dtype": dataclasses.replace(first, compute_dtype="bf16"),
        "one tensor-parallel degree": dataclasses.replace(
            first, replicas=(dataclasses.replace(one, ranks=(0, 1)),)
        ),
    }
    for what, group in lacks.items():
        changed = dataclasses.replace(plan, groups=(group, second))
        found = against_stock(changed, NODES, faster(1.0))
        assert what in found.lacks
        assert f" it has {found.lacks[0]}" in stock_sentence(found, 1.0)


def test_where_no_layout_fits_it_is_said_why():
    found = against_stock(even().layout.plan, NODES, StockAtBest(even=NONE, best=NONE))
    assert stock_sentence(found, 1.0) == (
        "Stock Megatron has no layout that fits: memory: too little."
    )
    some = dataclasses.replace(faster(1.0), even=NONE)
    told = stock_sentence(against_stock(even().layout.plan, NODES, some), 1.0)
    assert ", none fits evenly. " in told


@pytest.mark.slow
def test_explain_says_it_of_the_gpus_that_a_plan_is_for(tmp_path, monkeypatch):
    """Of a plan that leaves a GPU out, with the cluster file that is written beside it."""
    monkeypatch.setattr(
        stock_best,
        "stock_at_best",
        lambda inputs: StockAtBest(
            even=NONE, best=stock_best.stock_on_all(inputs, most_computations=1)
        ),
    )
    run = runner_in(tmp_path, monkeypatch)
    slow = "nodes: [{name: a, gpus: 1 x A100-40, nics: NIC}, {name: b, gpus: 1 x T4, nics: NIC}]"
    (tmp_path / "cluster.yaml").write_text(slow.replace("NIC", "100 Mb/s"))
    case = ("--model", "model.json", "--seq-length", "512", "--global-batch-size", "16")
    monkeypatch.setattr(find_plan_module, "replan", lambda inputs, **_: None)
    planned = run("plan", "--cluster", "cluster.yaml", *case, "--out", "less.json")
    assert planned.exit_code == 0, planned.output
    words = ("explain", "less.json", "--cluster", "less.cluster.yaml", *case, "--search")
    result = run(*words)
    assert result.exit_code == 0, result.output
    assert "\nStock Megatron takes " in result.stdout and " layout (1 A100-40: " in result.stdout
    monkeypatch.setattr(stock_best, "MOST_GPUS", 0)
    large = run(*words)
    assert "Stock Megatron takes" not in large.stdout
    assert "note: stock Megatron: not computed for more than 0 GPUs" in large.stdout
