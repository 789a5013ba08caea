"""Who is compared, and what their numbers are measured against."""

import dataclasses
import json
import re
from functools import cache

import pytest

from tests.megatron.plans import expert_replica, plan_of, replica, tp_replica
from tests.unit.fake_costs import FakeComm, FakeCompute
from zorse_megatron.cli.commands.emulate import emulated_together
from zorse_megatron.emulate import compare as compared_systems_module
from zorse_megatron.emulate.compare import (
    HEADINGS,
    OURS,
    STOCK,
    STOCK_EVEN,
    ComparedSystem,
    ComparisonReport,
    ComparisonRow,
    Planned,
    aggregate_tokens_per_s,
    compared_systems,
    rows_of,
)
from zorse_megatron.emulate.emulator import EmulatedRun, System, flags_of_grid
from zorse_megatron.emulate.tiny_model import HIDDEN_SIZE
from zorse_megatron.errors import Problem
from zorse_megatron.inputs.cluster_yaml import parse_cluster
from zorse_megatron.inputs.model import MODELS
from zorse_megatron.planner.baselines.stock_best import Stock, StockAtBest, stock_at_best
from zorse_megatron.planner.baselines.stock_layouts import Grid
from zorse_megatron.planner.find_plan import find_plan
from zorse_megatron.planner.inputs.search_inputs import SearchSpace, make_inputs, on_ranks
from zorse_megatron.planner.outcome import STRATEGIES, NoPlanError

pytestmark = pytest.mark.slow

CLUSTER = parse_cluster(
    b"nodes: [{gpus: 2 x A6000, nics: 100 Gb/s}, {gpus: 2 x V100-16, nics: 100 Gb/s}]"
)
MODEL = dataclasses.replace(MODELS["llama-3b"], num_layers=8)


def make(cluster, batch=16):
    return make_inputs(
        cluster,
        MODEL,
        None,
        global_batch_size=batch,
        dtype="float16",
        space=SearchSpace(offload=False, max_tensor_parallel=1, split_backward=False),
    )


@cache
def at_best():
    return stock_at_best(make(CLUSTER))


@pytest.mark.usefixtures("little_effort")
def test_everybody_on_a_cluster_of_two_kinds(monkeypatch):
    """Of ours, the plan of some GPUs runs on those."""
    monkeypatch.setattr(compared_systems_module, "stock_at_best", lambda inputs: at_best())
    inputs, some = make(CLUSTER), (0, 2)

    def planned(strategy):
        part = on_ranks(inputs, some)
        return Planned(ranks=some, outcome=find_plan(part, strategy=strategy))

    found = {each.name: each for each in compared_systems(inputs, STRATEGIES, planned)}
    assert list(found) == [STOCK_EVEN, STOCK, "zorse-paper", "cephalo", OURS]
    for name, stock in ((STOCK_EVEN, at_best().even), (STOCK, at_best().best)):
        assert found[name].layout == stock.fitting.description
        assert found[name].system.gpus == stock.fitting.ranks
        assert found[name].predicted_s == stock.fitting.iteration_s
    ours = found[OURS]
    assert (ours.system.gpus, ours.system.plan.world_size) == (some, 2)
    assert ours.layout.startswith("1 A6000, 1 V100-16: groups of ")
    for each in found.values():
        assert each.system is not None and not each.reason
        assert 0 < each.peak_memory_fraction <= 1 and each.predicted_s > 0


def test_where_no_stock_layout_fits_the_closest_is_run_once(monkeypatch):
    misfit = dataclasses.replace(at_best().even, reason="memory: too little")
    assert misfit.layout is not None and misfit.fitting is None

    def nothing(_strategy):
        problem = Problem(where="rank 4", found="1", expected="2", remedy="Buy.")
        raise NoPlanError("no plan", [problem])

    def ours(_strategy):
        return Planned(ranks=tuple(range(4)), outcome=find_plan(make(CLUSTER), strategy="cephalo"))

    small = StockAtBest(even=misfit, best=Stock(layout=None, reason="memory: too little"))
    monkeypatch.setattr(compared_systems_module, "stock_at_best", lambda inputs: small)
    even, best, _ = compared_systems(make(CLUSTER), ("stock", "zorse"), ours)
    assert even.system is not None and best.system is None
    assert even.predicted_s is best.predicted_s is None
    with pytest.raises(NoPlanError) as refused:
        compared_systems(make(CLUSTER), ("stock", "cephalo"), nothing)
    assert [each.where for each in refused.value.problems] == [STOCK_EVEN, STOCK, "cephalo"]
    assert "rank 4: found 1; expected 2" in str(refused.value)


def test_flags_of_a_grid():
    grid = Grid(layers=(6, 7, 7, 6), width=2, micro_batch_size=4, mode="full")
    flags = flags_of_grid(make(CLUSTER), grid)
    bucket = int(flags[flags.index("--ddp-bucket-size") + 1])
    tiny_layer = 12 * HIDDEN_SIZE**2 + 13 * HIDDEN_SIZE
    assert bucket == pytest.approx(40e6 / MODEL.layer_parameters() * tiny_layer, abs=1)
    assert flags[:4] == ("--pipeline-model-parallel-size", "4", "--micro-batch-size", "4")
    assert "--account-for-embedding-in-pipeline-split" in flags
    assert "--account-for-loss-in-pipeline-split" in flags
    assert "uniform" in flags
    assert grid.description == "PP 4 (6+7+7+6) DP 2, micro-batches of 4, recompute full"
    virtual = dataclasses.replace(grid, layers=(3, 4, 4, 4, 4, 3), virtual=3)
    assert "--num-virtual-stages-per-pipeline-rank" not in flags
    flags = flags_of_grid(make(CLUSTER), virtual)
    assert flags[flags.index("--num-virtual-stages-per-pipeline-rank") + 1] == "3"
    assert flags[:2] == ("--pipeline-model-parallel-size", "2")
    assert virtual.description == "PP 2 VPP 3 DP 2, micro-batches of 4, recompute full"


def test_aggregate_is_what_each_gpu_does_alone():
    """8 layers of 3 s a sample, 0.5 s for the embedding and 1.5 s for the head; V100s twice."""
    compute = FakeCompute(embedding_s=0.25, head_s=0.75, factors={"V100-16": 2.0})
    inputs = dataclasses.replace(make(CLUSTER), compute=compute, comm=FakeComm())
    per_sample_s = 8 * 3 + 0.5 + 1.5
    expected = inputs.sequence_length * (2 / per_sample_s + 2 / (2 * per_sample_s))
    assert aggregate_tokens_per_s(inputs) == pytest.approx(expected)


def result(name, iteration_s, *, predicted_s=None, out_of_memory=None):
    system = System(name=name, gpus=(0, 3))
    run = EmulatedRun(
        system=system,
        iterations_s=() if out_of_memory else (9.0, iteration_s, iteration_s),
        losses=() if out_of_memory else (5.0, 4.0, 3.5),
        spans=((("F", 10.0, 11.0), ("B", 11.0, 13.0)), (("STEP", 13.0, 14.0),)),
        peak_bytes=(1, 2),
        out_of_memory=out_of_memory,
    )
    fit = {"predicted_s": predicted_s, "peak_memory_fraction": 0.8}
    return ComparedSystem(name=name, layout="<so>", system=system, run=run, **fit)


def some_results():
    skipped = ComparedSystem(
        name="cephalo", layout="-", system=None, predicted_s=None, reason="does not fit"
    )
    return [
        result(STOCK_EVEN, 0.0, out_of_memory="CUDA out of memory"),
        result(STOCK, 4.0, predicted_s=5.0),
        skipped,
        result(OURS, 2.0, predicted_s=1.9),
    ]


def test_rows():
    inputs = make(CLUSTER)
    tokens = 16 * inputs.sequence_length
    even, stock, cephalo, ours = rows_of(some_results(), inputs)
    assert (stock.speedup_vs_stock, ours.speedup_vs_stock) == (1.0, 2.0)
    assert ours.tokens_per_s == tokens / 2.0
    assert ours.efficiency_of_aggregate == pytest.approx(
        tokens / 2.0 / aggregate_tokens_per_s(inputs)
    )
    assert (stock.prediction_error, ours.prediction_error) == pytest.approx((0.25, -0.05))
    for row in (even, cephalo):
        assert (row.iteration_s, row.tokens_per_s, row.final_loss) == (None, None, None)
    assert ours.final_loss == 3.5


def test_all_are_compared_with_the_best_layout_of_stock():
    results = [result(STOCK_EVEN, 4.0), result(STOCK, 3.0), result(OURS, 2.0)]
    assert [row.speedup_vs_stock for row in rows_of(results, make(CLUSTER))] == [0.75, 1.0, 1.5]
    none = [results[0], result(STOCK, 0.0, out_of_memory="CUDA out of memory"), results[2]]
    assert [row.speedup_vs_stock for row in rows_of(none, make(CLUSTER))] == [None, None, None]


def test_what_is_simulated_only_has_the_simulators_figures():
    results = [dataclasses.replace(each, run=None, is_emulated=False) for each in some_results()]
    report = ComparisonReport.of(results, make(CLUSTER), title="t", notes=())
    _, stock, _, ours = report.rows
    assert (stock.iteration_s, stock.prediction_error) == (5.0, None)
    assert (ours.speedup_vs_stock, ours.final_loss) == (5.0 / 1.9, None)
    assert report.headings == HEADINGS[:-2]
    cells = report.table()
    assert [row[2] for row in cells] == ["does not fit", "5 s", "does not fit", "1.9 s"]
    assert all(len(row) == len(HEADINGS) - 2 for row in cells)


def test_files(tmp_path):
    report = ComparisonReport.of(some_results(), make(CLUSTER), title="a < b", notes=("n & m",))
    names = [path.name for path in report.save(tmp_path / "made")]
    assert names == ["compare.json", "bars.png", "timeline.png", "compare.html"]
    rows = json.loads((tmp_path / "made" / "compare.json").read_text())
    fields = (
        "system, layout, reason, iteration_s, tokens_per_s, speedup_vs_stock, "
        "efficiency_of_aggregate, peak_memory_fraction, predicted_iteration_s, prediction_error, "
        "final_loss"
    )
    assert [", ".join(row) for row in rows] == [fields] * 4
    assert ComparisonRow(**rows[3]) == report.rows[3]
    page = (tmp_path / "made" / "compare.html").read_text()
    assert page.count("data:image/png;base64,") == 2
    assert "src=" not in re.sub(r'src="data:image', "", page)  # nothing is loaded from elsewhere
    for text in ("a &lt; b", "&lt;so&gt;", "out of memory", "does not fit", "n &amp; m"):
        assert text in page
    assert "stock, best even layout: CUDA out of memory" in page
    from matplotlib import image

    pixels = image.imread(tmp_path / "made" / "timeline.png")[..., :3]
    colours = {tuple(map(int, each)) for each in (pixels * 255).round().reshape(-1, 3)[::7]}
    for colour in ((0x56, 0xB4, 0xE9), (0xE6, 0x9F, 0x00), (0x8C, 0x2D, 0x04)):
        assert colour in colours  # the work of both


def test_table_says_who_has_no_number():
    report = ComparisonReport.of(some_results(), make(CLUSTER), title="t", notes=())
    cells = report.table()
    assert all(len(row) == len(HEADINGS) for row in cells)
    assert cells[0][2] == "out of memory"
    assert cells[1][2:8] == ("4 s", "8,192", "1.00 x", cells[1][5], "80 %", "5 s (+25.0 %)")
    assert cells[2][2] == "does not fit"
    assert cells[3][2] == "2 s"


def test_beside_a_plan_that_shares_experts_tp_groups_are_simulated():
    """The tiny model has experts then, which no TP group of the emulation divides."""

    def compared(each):
        system = System(name="x", gpus=each.ranks, plan=plan_of(((each,), 2)))
        return ComparedSystem(name="x", layout="", system=system, predicted_s=1.0)

    shared = compared(expert_replica((0, 1), (1, 1), (1, 1), 4))
    alone, tp_group = compared(replica(0, 1, 8)), compared(tp_replica((0, 1), 2, 4))
    assert emulated_together([alone, tp_group]) == [alone, tp_group]
    *others, simulated = emulated_together([alone, shared, tp_group])
    assert others == [alone, shared]
    assert (simulated.system, simulated.iteration_s) == (None, 1.0)
    assert simulated.reason.startswith("simulated: ")
