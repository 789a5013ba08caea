"""The tables of README and docs/performance.md come from the shipped profile and the shipped plans.

Training emulated clusters takes minutes: what is computed anew here is the simulator's figure of
each row of stock and of ours, which the table sets against the emulated one, to the last digit.
"""

import dataclasses
import re
from functools import cache
from pathlib import Path

import PIL.Image
import pytest

from zorse_megatron.emulate.compare import STOCK, STOCK_EVEN, aggregate_tokens_per_s
from zorse_megatron.inputs.cluster_yaml import load_cluster
from zorse_megatron.inputs.model import MODELS
from zorse_megatron.inputs.profile import load_profile
from zorse_megatron.plan.plan_file import load_plan
from zorse_megatron.planner.baselines.stock_best import stock_at_best
from zorse_megatron.planner.baselines.stock_costs import grid_estimates
from zorse_megatron.planner.baselines.stock_layouts import grids, plan_of_grid, subsets
from zorse_megatron.planner.baselines.stock_search import framework_of
from zorse_megatron.planner.inputs.search_inputs import make_inputs, on_ranks
from zorse_megatron.planner.simulate_plan import simulate_plan

ROOT = Path(__file__).parents[2]
PERFORMANCE = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
# (cluster, model) -> samples and tokens of each, as the document says above its table.
BATCHES = {
    ("mini-b", "llama-3b"): (128, 1024),
    ("mini-b", "llama-7b"): (128, 1024),
    ("mini-a", "llama-13b"): (32, 4096),
    ("mini-c", "llama-3b"): (128, 512),
}


@cache
def rows():
    """The table: {(cluster, model): {system: (layout, seconds, against stock, deviation)}}."""
    found, key = {}, None
    lines = PERFORMANCE.split("| Cluster, model, batch |")[1].split("\n\n")[0].splitlines()[2:]
    for line in lines:
        what, system, layout, seconds, against, *_, deviation = (
            cell.strip() for cell in line.strip("|").split("|")
        )
        if what:
            cluster, model, batch = what.split(", ")
            key = cluster, model
            if key in BATCHES:
                assert batch == "{} x {}".format(*BATCHES[key])
        found.setdefault(key, {})[system] = (layout, seconds, against, deviation)
    return found


@cache
def inputs_of(cluster, model):
    batch, tokens = BATCHES[cluster, model]
    return make_inputs(
        load_cluster(ROOT / "examples" / f"{cluster}.yaml"),
        dataclasses.replace(MODELS[model], seq_length=tokens),
        load_profile(ROOT / "examples" / "mini-profile.json"),
        global_batch_size=batch,
        dtype="float16",
    )


@cache
def ours(cluster, model):
    """The shipped plan, simulated."""
    plan = load_plan(ROOT / "examples" / f"{cluster}-{model}-plan.json")
    return plan, simulate_plan(inputs_of(cluster, model), plan, merge_equal_ranks=True)


def assert_is_shown(simulated_s, row):
    """The row's seconds and deviation, each as rounded as it is shown."""
    _, seconds, _, deviation = row
    shown_s, off = float(seconds.removesuffix(" s")), float(deviation.removesuffix(" %")) / 100
    assert (shown_s - 0.005) * (1 + off - 0.0005) <= simulated_s
    assert simulated_s <= (shown_s + 0.005) * (1 + off + 0.0005)


@pytest.mark.parametrize(("cluster", "model"), BATCHES)
def test_ours_is_the_shipped_plan_on_the_shipped_profile(cluster, model):
    inputs = inputs_of(cluster, model)
    plan, simulated = ours(cluster, model)
    assert plan.model == inputs.model and plan.cluster == inputs.cluster
    row = rows()[cluster, model]["zorse"]
    assert_is_shown(simulated.iteration_s, row)
    assert f": {len(plan.groups)} groups" in row[0]
    pairs = zip(simulated.peak_memory_bytes, inputs.capacities_bytes, strict=True)
    assert all(peak <= capacity for peak, capacity in pairs)


@pytest.mark.parametrize(("cluster", "model"), BATCHES)
def test_stock_is_the_even_layout_that_is_named(cluster, model):
    row = rows()[cluster, model][STOCK_EVEN]
    inputs = inputs_of(cluster, model)
    parts = [inputs, *(on_ranks(inputs, ranks) for ranks in subsets(inputs))]
    if not row[1].endswith(" s"):
        assert all(estimate.fullest > 1 for p in parts for estimate in grid_estimates(p))
        return
    kinds, _, words = row[0].rpartition(": ")
    counted = {kind: int(number) for number, kind in re.findall(r"(\d+) ([\w-]+)", kinds)}
    inputs = next(
        part for part in parts if {kind: part.kinds.count(kind) for kind in part.kinds} == counted
    )
    names = (words, f"{words}, recompute none")  # which the table leaves out
    (grid,) = (each for each in grids(inputs) if each.description in names)
    plan = plan_of_grid(inputs, grid)
    simulated = simulate_plan(inputs, plan, framework=framework_of(grid), merge_equal_ranks=True)
    assert_is_shown(simulated.iteration_s, row)


@pytest.mark.slow
def test_the_best_layout_of_stock_is_the_one_that_is_found():
    """Of a row whose search is short: eight stages over two regions."""
    case = ("mini-c", "llama-3b")
    found = stock_at_best(inputs_of(*case)).best.fitting
    row = rows()[case][STOCK]
    assert found.description.removesuffix(", recompute none") == row[0]
    assert_is_shown(found.iteration_s, row)


def test_the_best_layout_of_stock_is_what_speeds_are_told_against():
    for systems in rows().values():
        best_s, even, ours = (seconds(systems[name]) for name in (STOCK, STOCK_EVEN, "zorse"))
        assert systems[STOCK][2] == "1.00 x"
        for name, each_s in ((STOCK_EVEN, even), ("zorse", ours)):
            assert float(systems[name][2].split()[0]) == pytest.approx(best_s / each_s, abs=0.01)


def test_readme_shows_these_rows():
    table = (
        README.split("| Cluster, emulated on CPU | Model |")[1].split("\n\n")[0].splitlines()[2:]
    )
    shown, cluster = {}, None
    for line in table:
        where, size, *systems = (cell.strip() for cell in line.strip("|").split("|"))
        named = re.search(r"mini-[abc]", where)
        cluster = named[0] if named else cluster
        shown[cluster, f"llama-{size.lower()}"] = systems
    assert list(shown) == list(BATCHES)
    for key, systems in shown.items():
        cells = [rows()[key][name][1] for name in (STOCK_EVEN, STOCK, "zorse")]
        rounded = [re.sub(r"^[\d.]+(?= s$)", lambda n: f"{float(n[0]):.1f}", c) for c in cells]
        assert systems == rounded


def test_readme_says_what_share_of_the_gpus_speed_these_plans_reach():
    shares = []
    for (cluster, model), (batch, tokens) in BATCHES.items():
        alone = aggregate_tokens_per_s(inputs_of(cluster, model))
        shares.append(batch * tokens / ours(cluster, model)[1].iteration_s / alone)
    said = re.search(r"These plans reach (\d+) to (\d+) % of the GPUs'", README)
    assert [int(share) for share in said.groups()] == [
        round(100 * share) for share in (min(shares), max(shares))
    ]


def test_the_picture_shows_the_first_row_and_the_document_says_so():
    """What a picture shows is in the file as text, too."""
    (stock, planned) = (
        PIL.Image.open(ROOT / "docs" / "images" / "compare-timeline.png")
        .text["Description"]
        .split("\n")
    )
    row = next(iter(rows().values()))
    assert stock.startswith(f"{STOCK}: {row[STOCK][0]}") and planned.startswith("zorse: ")
    assert f"first row of the table below: above {STOCK} ({row[STOCK][0]})" in PERFORMANCE
    cluster = load_cluster(ROOT / "examples" / "mini-b.yaml")
    names = [f"{kind}, GPU {gpu}" for gpu, kind in enumerate(cluster.gpu_kinds)]
    assert planned.endswith(f"({', '.join(names)})")


def seconds(row):
    return float(row[1].removesuffix(" s"))


def test_the_document_says_how_each_row_is_made():
    usual_batch, usual_tokens = next(iter(BATCHES.values()))
    for (cluster, model), (batch, tokens) in BATCHES.items():
        words = [f"--cluster examples/{cluster}.yaml", f"--model {model}"]
        words += [f"--global-batch-size {batch}"] * (batch != usual_batch)
        words += [f"--seq-length {tokens}"] * (tokens != usual_tokens)
        lines = PERFORMANCE.split("## Emulated comparison")[1].split("\n## ")[0].splitlines()
        assert any(all(word in line for word in words) for line in lines), (cluster, model)
