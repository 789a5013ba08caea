"""The benchmark against stock: its clusters, what it accounts for, and what it publishes."""

import json
import re
import sys

import pytest
from PIL import Image

from scripts import bench_stock
from scripts.bench_stock import DOCUMENT, PUBLISHED, cases
from scripts.bench_stock_tables import described, gain, medians, tables, with_tables
from scripts.where_time_goes import ideal_s, lost_s
from zorse_megatron.cli.workload import workload_of
from zorse_megatron.inputs.cluster_yaml import parse_cluster
from zorse_megatron.inputs.model import MODELS
from zorse_megatron.planner.baselines.stock_layouts import Grid, plan_of_grid
from zorse_megatron.planner.inputs.search_inputs import make_inputs
from zorse_megatron.planner.simulate_plan import simulate_plan

PC = b"nodes: [{gpus: [1 x A6000, 1 x RTX3090]}]"
ONE = b"nodes: [{gpus: [1 x A6000]}]"
GRID = Grid(layers=(24,), width=1, micro_batch_size=1, mode="none")


def test_the_clusters_are_what_the_benchmark_says():
    found = cases()
    sizes = {case.name: parse_cluster(case.cluster_file).world_size for case in found}
    assert len(sizes) == 24
    assert (min(sizes.values()), max(sizes.values())) == (2, 64)
    assert [sizes[case.name] <= 8 for case in found if case.emulated] == [True] * 8
    for case in found:
        assert workload_of(flags=None, **case.train).dtype == case.train["dtype"]


def inputs_of(cluster, batch=8):
    return make_inputs(
        parse_cluster(cluster), MODELS["gpt-1.3b"], None, global_batch_size=batch, dtype="float16"
    )


def accounted(cluster, grid, whole=None):
    """Losses of a layout on our runtime, the iteration, and one without losses."""
    inputs = inputs_of(cluster)
    plan = plan_of_grid(inputs, grid)
    result = simulate_plan(inputs, plan)
    lost = lost_s(whole or inputs, inputs, plan, result)
    without_s = ideal_s(whole or inputs)
    assert without_s + sum(lost.values()) == pytest.approx(result.iteration_s)
    return lost, without_s, inputs


def test_one_gpu_loses_by_its_micro_batches_and_the_update_only():
    lost, without_s, inputs = accounted(ONE, GRID)
    times = [inputs.compute.layer("A6000", 1), inputs.compute.embedding("A6000", 1)]
    times.append(inputs.compute.head("A6000", 1))
    takes_s = [each.forward_s + each.backward_s for each in times]
    computing_s = 8 * (24 * takes_s[0] + takes_s[1] + takes_s[2])
    assert lost["micro-batch sizes and TP groups"] == pytest.approx(computing_s - without_s)
    assert lost["update"] > 0
    for name in ("GPUs left out", "recomputation", "imbalance", "fill, drain, waits"):
        assert lost[name] == pytest.approx(0, abs=1e-9), name


@pytest.mark.parametrize(("mode", "count", "layers"), [("full", None, 24), ("full", 5, 5)])
def test_recomputation_takes_what_its_layers_take(mode, count, layers):
    grid = Grid(layers=(24,), width=1, micro_batch_size=2, mode=mode, recomputed=count)
    lost, _, inputs = accounted(ONE, grid)
    again_s = inputs.compute.recompute_s("A6000", 2, mode)
    assert lost["recomputation"] == pytest.approx(4 * layers * again_s)


def test_uneven_gpus_lose_by_even_layers_and_a_pipeline_fills_and_drains():
    even = Grid(layers=(12, 12), width=1, micro_batch_size=1, mode="none")
    fairer = Grid(layers=(15, 9), width=1, micro_batch_size=1, mode="none")
    of_even, of_fairer = (accounted(PC, grid)[0] for grid in (even, fairer))
    assert of_fairer["imbalance"] < 0.5 * of_even["imbalance"]
    assert of_even["fill, drain, waits"] > 0


def test_a_gpu_that_is_left_out_is_lost():
    whole = inputs_of(PC)
    lost, without_s, inputs = accounted(ONE, GRID, whole)
    assert lost["GPUs left out"] == pytest.approx(ideal_s(inputs) - without_s)
    assert lost["GPUs left out"] > 0


def published():
    return json.loads(PUBLISHED.read_text(encoding="utf-8"))


def test_the_document_has_the_published_tables():
    text = DOCUMENT.read_text(encoding="utf-8")
    assert with_tables(text, published()) == text, "run scripts/bench_stock.py --write-docs"


def test_what_is_published_is_of_the_clusters_in_the_file_and_never_slower():
    trained = {case.name: (case.what, case.train) for case in cases()}
    for row in published():
        assert (row["what"], row["train"]) == trained[row["name"]]
        assert gain(row) is None or gain(row) >= 1.0


def test_readme_says_what_is_published():
    readme = (bench_stock.ROOT / "README.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| ((?:stock's|our).*?)(?:, which.*?)? \| (.*?) \|$", readme, re.M))
    assert rows == medians(published())


def test_the_picture_is_of_the_published_figures():
    with Image.open(PUBLISHED.with_suffix(".png")) as picture:
        assert picture.text["Description"] == described(published())


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs the program with measurements of ours; how often it has measured."""
    measured = []

    def measure(case, _directory):
        measured.append(case.name)
        row = next(iter(published()))
        best_s, ours_s = times[case.name]
        changed = {system: {**row[system]} for system in ("best", "ours")}
        changed["best"]["iteration_s"], changed["ours"]["iteration_s"] = best_s, ours_s
        return {**row, **changed, "name": case.name, "digest": case.digest}

    times = {"one-pc": (2.0, 1.0), "two-pcs": (1.0, 1.0)}

    def run(*words):
        names = [word for name in times for word in ("--only", name)]
        monkeypatch.setattr(sys, "argv", ["bench_stock", "--out", str(tmp_path), *names, *words])
        return bench_stock.main()

    monkeypatch.setattr(bench_stock, "measured", measure)
    monkeypatch.setattr(bench_stock, "draw", lambda *_: None)  # half a second
    run.times, run.measured = times, measured
    return run


def test_who_is_slower_than_stock_ends_the_program(run, capsys, monkeypatch):
    assert run() == 0
    run.measured.clear()
    run.times["two-pcs"] = (1.0, 1.01)
    monkeypatch.setattr(bench_stock, "_digest_of_planner", lambda: b"another planner")
    assert run() == 1
    assert run.measured == ["one-pc", "two-pcs"]
    assert "slower than stock's best layout: two-pcs: 0.9901" in capsys.readouterr().err


def test_what_is_there_is_not_measured_again(run):
    assert run() == run() == 0
    assert run.measured == ["one-pc", "two-pcs"]


def test_what_does_not_fit_is_said():
    row = next(iter(published()))
    nothing = {"iteration_s": None, "layout": "memory"}
    told = tables([{**row, "even": nothing, "best": nothing}])
    assert "| does not fit | does not fit |" in told
    assert gain({**row, "best": nothing}) is None
