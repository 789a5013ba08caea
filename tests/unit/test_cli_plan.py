"""`zorse plan`, `zorse explain` and `zorse compare --simulated`: what they hand on and print.

The search is a stand-in here, so that its answers are known; at the end the real one runs once.
"""

import base64
import dataclasses
import html
import io
import json
import re

import pytest

from tests.unit.cli_samples import FLAGS, WORKLOAD, cells, lab_plan
from zorse_megatron import extras
from zorse_megatron.cli import answer as answer_module
from zorse_megatron.cli.options import DEFAULT_MARGIN
from zorse_megatron.cli.workload import workload_of
from zorse_megatron.cli.workload_costs import costs_of_workload
from zorse_megatron.errors import Problem
from zorse_megatron.inputs.cluster_yaml import load_cluster
from zorse_megatron.plan.plan import Group, Offload, Predictions, Recompute
from zorse_megatron.plan.plan_file import load_plan, parse_plan
from zorse_megatron.planner import find_plan as search_module
from zorse_megatron.planner.baselines import stock_best
from zorse_megatron.planner.find_plan import OneMore, Replans
from zorse_megatron.planner.inputs import search_inputs as inputs_module
from zorse_megatron.planner.inputs.search_inputs import SearchSpace
from zorse_megatron.planner.outcome import (
    LinkBound,
    NoPlanError,
    Outcome,
    Rejected,
    SearchProgress,
    SearchStats,
)
from zorse_megatron.planner.simulate_plan import simulate_plan

PLAN = ("plan", "--use-all", *WORKLOAD)
COMPARE = ("compare", "--simulated", "--use-all", *WORKLOAD)
EXPLAIN = ("explain", "plan.json", "--cluster", "cluster.yaml", "--model", "model.json")
STOCK_SPEED = 2.0


class Search:
    """Stands in for the search: the same plan every time, slower by strategy."""

    def __init__(self):
        self.inputs = []
        self.changed = lambda group: group

    def __call__(self, inputs, *, strategy="zorse", stock=None, on_progress=None):
        self.inputs.append(inputs)
        if on_progress:
            on_progress(SearchProgress(phase="grouping", done=1, total=2))
        if strategy == "cephalo":
            problem = Problem(where="rank 4 (V100-16)", found="1", expected="2", remedy="Buy.")
            raise NoPlanError("no plan fits", [problem])
        plan = parse_plan(json.dumps(lab_plan()).encode())
        plan = dataclasses.replace(plan, groups=tuple(map(self.changed, plan.groups)))
        result = simulate_plan(inputs, plan)
        slowness = {"zorse": 1.0, "stock": STOCK_SPEED, "zorse-paper": 1.5}[strategy]
        predictions = Predictions(
            iteration_s=result.iteration_s,
            tokens_per_s=result.tokens_per_s,
            peak_memory_bytes=result.peak_memory_bytes,
        )
        return Outcome(
            strategy=strategy,
            plan=dataclasses.replace(plan, predictions=predictions),
            simulation=result,
            iteration_s=slowness * result.iteration_s,
            tokens_per_s=result.tokens_per_s / slowness,
            bound_s=0.5 * result.iteration_s,
            recomputing_bound_s=0.6 * result.iteration_s,
            link_bound=LinkBound(bound_s=0.5 * result.iteration_s, link=None),
            peak_memory_fraction=0.5,
            extrapolated=False,
            rejected=(Rejected(what="one group", why="12 % slower", iteration_s=1.0),),
            considered=SearchStats(groupings=3, estimated=20, simulated=4),
            plan_time_s=0.25,
            margin=inputs.memory_margin,
            notes=("a note of the search",),
        )


def fake_replan(inputs, *, found_s=None, on_progress=None):
    more = OneMore(kind="A6000", node="new", iteration_s=0.8, speedup=1.25)
    return Replans(again_s=found_s or 1.0, one_more=(more,))


@pytest.fixture
def run(run, monkeypatch, few_layouts, little_effort):
    monkeypatch.setattr(stock_best, "stock_at_best", some_stock)
    return run


@pytest.fixture
def search(monkeypatch):
    stand_in = Search()
    monkeypatch.setattr(search_module, "find_plan", stand_in)
    monkeypatch.setattr(search_module, "replan", fake_replan)
    return stand_in


def some_stock(inputs):
    """Layouts that are at hand; the better one as if it were four times as fast."""
    even = stock_best.stock_on_all(inputs, most_computations=1)
    layout = dataclasses.replace(even.layout, iteration_s=even.layout.iteration_s / 4)
    site = dataclasses.replace(
        layout.site, grid=dataclasses.replace(layout.grid, micro_batch_size=7)
    )
    best = dataclasses.replace(even, layout=dataclasses.replace(layout, site=site))
    return stock_best.StockAtBest(even=even, best=best)


def test_plan_prints_the_plan_and_the_reasons(run, search):
    result = run(*PLAN, "--verbose")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert any(line.startswith("plan ") for line in lines)
    assert [row[:4] for row in cells(result.stdout)] == [
        ["0 new", "0 to 4", "A6000", "0 to 3"],
        ["1 old", "5 to 7", "V100-16", "4 to 7"],
    ]
    starts = [
        "No plan can take less than ",
        "Searched in 250 ms: 3 groupings, 20 candidates estimated, 4 simulated",
        "rejected: one group: 12 % slower",
        "note: compute dtype float16, which every kind of GPU supports",
        "note: V100-16: estimated: data-sheet peak x efficiency calibrated on this GPU (",
        "note: a note of the search",
    ]
    for start in starts:
        assert any(line.startswith(start) for line in lines), start
    assert result.stderr == ""  # no progress bar where there is no terminal


def test_a_plan_too_large_to_explain(run, search, monkeypatch):
    monkeypatch.setattr(answer_module, "MOST_EXPLAINED", 7)
    result = run(*PLAN, "--verbose")
    assert "Critical path: " not in result.stdout
    assert "Limited by: see zorse explain" in result.stdout


@pytest.mark.slow
def test_the_page_has_everything_in_it(run, search, tmp_path):
    text = (tmp_path / "cluster.yaml").read_text()
    (tmp_path / "cluster.yaml").write_text(
        "name: <lab> & co\n" + re.sub(r"name: .*\n", "", text, count=1)
    )
    result = run(*PLAN, "--html", "page.html")
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-1] == "written: page.html"
    page = (tmp_path / "page.html").read_text()
    pictures = re.findall(r'src="data:image/png;base64,([^"]+)"', page)
    assert len(pictures) == 2
    from matplotlib import image

    for picture in pictures:
        pixels = image.imread(io.BytesIO(base64.b64decode(picture)))
        assert min(pixels.shape[:2]) > 300
        assert len({tuple(pixel) for pixel in pixels[::9, ::9].reshape(-1, 4).tolist()}) > 5
    bare = re.sub(r'src="data:[^"]+"', "", page)
    assert not re.search(r"src=|href=|@import|url\(", bare)  # nothing is loaded from elsewhere
    assert "on &lt;lab&gt; &amp; co</h1>" in page
    for expected in (
        "<p>Critical path: ",
        "<p>With one more A6000 in node new: 800 ms, 25 % faster.</p>",
        "<p>rejected: one group: 12 % slower</p>",
        "<p>note: a note of the search</p>",
        "<td>0 new</td><td>0 to 4</td><td>A6000</td><td>0 to 3</td>",
        "<td>0 to 3</td><td>A6000</td>",
    ):
        assert expected in page, expected
    shown = run(*PLAN, "--verbose").stdout.splitlines()
    assert f"<p>{html.escape(shown[0])}</p>" in page
    assert f"<p>{html.escape(shown[1])}</p>" in page  # what stock Megatron takes


@pytest.mark.slow
def test_the_page_names_the_spares(run, tmp_path, monkeypatch):
    slow = "nodes: [{name: a, gpus: 1 x A100-40, nics: NIC}, {name: b, gpus: 1 x T4, nics: NIC}]"
    (tmp_path / "cluster.yaml").write_text(slow.replace("NIC", "100 Mb/s"))
    result = run("plan", *WORKLOAD, "--html", "page.html")
    assert result.exit_code == 0, result.output
    page = (tmp_path / "page.html").read_text()
    assert "<p>GPUs used: 1 A100-40 (1 of 2); left out as spares: 1 T4 of node b</p>" in page


def test_a_page_without_its_extra_is_refused_before_the_search(run, search, monkeypatch):
    monkeypatch.setattr(extras, "_is_there", lambda module: module != "matplotlib")
    result = run(*PLAN, "--html", "page.html")
    assert result.exit_code == 1
    assert "pip install 'zorse-megatron[plots]'" in result.stderr
    assert not search.inputs


def test_plan_json(run, search):
    answer = json.loads(run(*PLAN, "--json", "--out", "new.json").stdout)
    assert answer["ok"] is True
    assert answer["efficiency"] == pytest.approx(0.5)
    assert any(each.startswith("Critical path: ") for each in answer["reasons"])
    assert answer["rejected"][0]["why"] == "12 % slower"
    assert answer["written"] == "new.json"
    assert answer["can_be_trained"] is True
    written = load_plan("new.json")
    assert parse_plan(json.dumps(answer["plan"]).encode()) == written
    assert written.predictions.iteration_s > 0
    assert len(written.predictions.peak_memory_bytes) == 8
    assert run("check", "new.json", "cluster.yaml", "model.json").exit_code == 0


def first_two_as_a_tp_group(group: Group) -> Group:
    """Its first two replicas joined, beside single ranks, with 16-bit gradients on the way."""
    one, two, *others = group.replicas
    together = dataclasses.replace(
        one,
        ranks=(*one.ranks, *two.ranks),
        num_microbatches=one.num_microbatches
        + two.num_microbatches * two.micro_batch_size // one.micro_batch_size,
    )
    return dataclasses.replace(group, replicas=(together, *others), grad_reduce_dtype="fp16")


def test_what_cannot_be_trained_yet_is_said(run, search):
    search.changed = first_two_as_a_tp_group
    said = "this version cannot train this plan yet: groups[0].grad_reduce_dtype"
    assert said in run(*PLAN).stdout
    assert f"note: {said}" in run(*PLAN, "--verbose").stdout
    answer = json.loads(run(*PLAN, "--json").stdout)
    assert answer["can_be_trained"] is False


def test_what_saves_memory_is_said(run, search):
    settings = {
        "offload": Offload(activations=True),
        "recompute": Recompute(mode="full", num_layers=2),
    }
    search.changed = lambda group: dataclasses.replace(group, **settings)
    text = " ".join(run(*PLAN, "--verbose").stdout.replace("│", " ").split())
    assert "full recompute of 2 layers, activations on host" in text


def dtypes_of(inputs):
    """Of all kinds: the lab's run different attention, so each has its costs."""
    return {each.dtype for each in inputs.compute.computes.values()}


def test_options_reach_the_search(run, search):
    run(*PLAN, "--margin", "0.2", "--seq-length", "256", "--dtype", "float32")
    known = ("--cluster", "cluster.yaml", "--model", "Llama-7B", "--global-batch-size", "4")
    run("plan", "--use-all", *known)
    inputs, of_known = search.inputs
    assert of_known.num_layers == 32
    assert inputs.memory_margin == 0.2
    assert inputs.sequence_length == 256
    assert inputs.global_batch_size == 16
    assert dtypes_of(inputs) == {"float32"}


def test_flags_of_the_training_command_say_everything(run, search):
    after = run("plan", "--use-all", "--cluster", "cluster.yaml", "--", "pretrain_gpt.py", *FLAGS)
    quoted = run("plan", "--use-all", "--cluster", "cluster.yaml", "--model", " ".join(FLAGS))
    for result, inputs in zip((after, quoted), search.inputs, strict=True):
        assert result.exit_code == 0, result.output
        assert (inputs.global_batch_size, inputs.sequence_length) == (16, 512)
        assert dtypes_of(inputs) == {"float16"}
        assert "which every kind of GPU supports" not in result.stdout


def test_the_usual_margin():
    assert DEFAULT_MARGIN == inputs_module.DEFAULT_MARGIN


def test_no_plan(run, search):
    result = run(*PLAN, "--strategy", "cephalo", "--out", "new.json")
    assert result.exit_code == 1
    assert "rank 4 (V100-16): found 1; expected 2. Buy." in result.stderr
    assert run("check", "new.json").exit_code == 1


def test_a_plan_for_the_nodes_that_are_left(run, tmp_path):
    left = ("plan", *WORKLOAD, "--without", "old", "--strategy", "zorse-paper", "--use-all")
    result = run(*left, "--out", "left.json")
    assert result.exit_code == 0, result.output
    assert "\nWithout old: GPUs used: 4 A6000 (all 4); none left out\n" in result.stdout
    assert "written to left.json, its cluster file to left.cluster.yaml; " in result.stdout
    written = (tmp_path / "left.cluster.yaml").read_text()
    assert "# Without old.\n" in written and "V100" not in written
    assert run("check", "left.json", "left.cluster.yaml", "model.json").exit_code == 0
    assert load_plan("left.json").world_size == 4
    answer = json.loads(run(*left, "--json").stdout)
    assert (answer["without"], answer["cut_off"], answer["nodes"]) == (["old"], [], ["new"])


@pytest.mark.slow
def test_compare_in_the_simulator(run, search):
    result = run(*COMPARE)
    assert result.exit_code == 0, result.output
    rows = {row[0]: row[1:] for row in cells(result.stdout)}
    systems = ["stock, best even layout", "stock, best layout", "zorse-paper", "cephalo", "zorse"]
    assert list(rows) == systems
    assert rows["stock, best layout"][2] == "1.00 x"
    assert float(rows["stock, best even layout"][2].split()[0]) <= 1
    assert rows["zorse"][4] == "50 %"
    assert rows["cephalo"][0] == "does not fit"
    assert "cephalo: rank 4 (V100-16): found 1" in result.stdout
    assert re.search(r"\nstock, best layout: \d \S+.*: .*PP \d+.* DP ", result.stdout)


def test_what_is_compared_may_be_chosen(run, search):
    words = ("--json", "--strategy", "zorse", "--strategy", "cephalo")
    answer = json.loads(run(*COMPARE, *words).stdout)
    cephalo, ours = answer["rows"]
    assert (cephalo["system"], ours["system"]) == ("cephalo", "zorse")
    assert cephalo["reason"] == "rank 4 (V100-16): found 1; expected 2. Buy."
    assert ours["iteration_s"] > 0 and ours["speedup_vs_stock"] is None
    assert (answer["dtype"], answer["written"]) == ("float16", [])


@pytest.mark.slow
def test_compare_uses_the_gpus_that_plan_uses(run, tmp_path):
    """A T4 behind a slow link only delays the A100."""
    slow = "nodes: [{name: a, gpus: 1 x A100-40, nics: NIC}, {name: b, gpus: 1 x T4, nics: NIC}]"
    (tmp_path / "cluster.yaml").write_text(slow.replace("NIC", "100 Mb/s"))
    command = ("compare", "--simulated", *WORKLOAD, "--strategy", "zorse", "--json")
    (some,), (every,) = (
        json.loads(run(*command, *more).stdout)["rows"] for more in ((), ("--use-all",))
    )
    assert some["layout"].startswith("1 A100-40: ")
    assert every["layout"].startswith("1 A100-40, 1 T4: ")
    assert some["iteration_s"] < every["iteration_s"]


def test_nothing_to_compare_is_a_failure(run, search):
    assert run(*COMPARE, "--strategy", "cephalo").exit_code == 1


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ((), "--attention-dropout and --hidden-dropout rule it out."),
        (("--attention-dropout", "0", "--hidden-dropout", "0"), ""),
    ],
)
def test_plan_and_explain_say_the_same_of_tensor_parallelism(flags, said, run):
    """And search the same again: a plan that the training command rules out helps nobody."""
    told = ("--", "pretrain_gpt.py", *FLAGS, *flags)
    plan = run(
        *(
            "plan",
            "--cluster",
            "cluster.yaml",
            "--strategy",
            "zorse-paper",
            "--use-all",
            "--verbose",
        ),
        *("--out", "new.json", *told),
    )
    explained = run("explain", "new.json", "--cluster", "cluster.yaml", *told)
    lines = [
        [line for line in result.stdout.splitlines() if line.startswith("TP")]
        for result in (plan, explained)
    ]
    assert lines[0] == lines[1]
    if said:
        assert lines[0] == [f"TP not used: {said}"]
    else:
        assert [line.split(":")[0] for line in lines[0]] == [
            "TP=2 not used on A6000",
            "TP=2 not used on V100-16",
        ]


@pytest.mark.parametrize(("optimizer", "may"), [("adam", True), ("muon", False)])
def test_with_muon_plans_keep_state_and_whole_matrices_on_gpus(optimizer, may, tmp_path):
    (tmp_path / "cluster.yaml").write_text("nodes: [{name: a, gpus: 2 x T4, nics: 10 Gb/s}]")
    flags = [*FLAGS, "--attention-dropout", "0", "--hidden-dropout", "0"]
    words = [*(word for word in flags if word != "--fp16"), "--optimizer", optimizer]
    costs = costs_of_workload(
        load_cluster(tmp_path / "cluster.yaml"),
        workload_of(model=None, flags=words),
        (),
        global_batch_size=16,
        space=SearchSpace(offload_activations=True),
    )
    space = costs.inputs.space
    assert (space.offload, space.offload_activations) == (may, may)
    assert space.barring_tp == (() if may else ("--optimizer",))


@pytest.mark.parametrize(
    ("added", "options", "may"),
    [
        ((), (), True),
        ((), ("--no-split-backward",), False),
        (("--transformer-impl", "local"), (), False),
        (("--transformer-impl", "local", "--no-gradient-accumulation-fusion"), (), True),
    ],
)
def test_weight_gradients_are_apart_where_layers_can(run, search, added, options, may):
    told = ("--", "pretrain_gpt.py", *FLAGS, *added)
    result = run("plan", "--cluster", "cluster.yaml", "--use-all", "--verbose", *options, *told)
    (inputs,) = search.inputs
    assert inputs.space.split_backward == may
    said = "--no-gradient-accumulation-fusion plans may" in " ".join(result.stdout.split())
    assert said == bool(added and not may)


def test_a_new_search_of_explain_has_the_tp_groups_of_plan(run, search, monkeypatch):
    monkeypatch.setattr(search_module, "replan", lambda inputs, **_: search(inputs) and None)
    told = ("--", "pretrain_gpt.py", *FLAGS)
    run("plan", "--cluster", "cluster.yaml", "--use-all", *told)
    run("explain", "plan.json", "--cluster", "cluster.yaml", "--search", *told)
    planned, explained = (inputs.space for inputs in search.inputs)
    assert planned == explained
    assert planned.max_tensor_parallel == 1


def test_explain_json(run, search):
    answer = json.loads(run(*EXPLAIN, "--search", "--json").stdout)
    assert answer["replans"]["one_more"][0]["speedup"] == 1.25
    assert answer["headroom"][7]["rank"] == 7
    searched = len(search.inputs)
    assert "replans" not in json.loads(run(*EXPLAIN, "--json").stdout)
    assert len(search.inputs) == searched


@pytest.mark.slow
def test_progress_is_shown_on_a_terminal_only(run, search, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes the stream for a terminal
    assert "grouping" in run(*PLAN).stderr
    assert "plan of zorse: grouping" in run(*COMPARE, "--strategy", "zorse").stderr
    assert run(*PLAN, "--json").stderr == ""
    monkeypatch.delenv("FORCE_COLOR")
    assert run(*PLAN).stderr == ""


def test_a_plan_in_types_of_its_own_is_priced_alike_by_all_commands(run):
    paper = ("--strategy", "zorse-paper", "--out", "own.json", "--verbose")
    written = run(*PLAN, "--dtype", "auto", *paper)
    assert written.exit_code == 0, written.output
    assert "note: every group computes in its own compute_dtype" in written.stdout
    plan = load_plan("own.json")
    types = {group.compute_dtype for group in plan.groups}
    assert "fp16" in types and types <= {"fp16", "bf16"}
    assert types == {cell for row in cells(written.stdout) for cell in row} & {"fp16", "bf16"}
    # Other commands need not be told, and are not misled by what they are told.
    files = ("own.json", "--cluster", "cluster.yaml", "--model", "model.json")
    for told in ((), ("--dtype", "bf16")):
        explained = json.loads(run("explain", *files, *told, "--json").stdout)
        assert explained["iteration_s"] == pytest.approx(plan.predictions.iteration_s)
        assert explained["fits_in_memory"] is True
    checked = run("check", "own.json", "cluster.yaml", "model.json")
    assert checked.exit_code == 0, checked.output
    assert "computing in fp16" in checked.stdout
