"""`zorse plan` and stock Megatron: never slower than it, its layout handed over, each set once."""

import dataclasses
import json
import math
import re
import shlex
from pathlib import Path

import pytest

from tests.printed import each_search_once
from tests.unit.planner_cases import random_case
from tests.unit.test_selection import random_nodes
from tests.unit.test_stock_search import cluster_of
from zorse_megatron.cli import answer as plan_answer
from zorse_megatron.errors import Problem
from zorse_megatron.inputs.cluster_yaml import parse_cluster
from zorse_megatron.plan.plan import Offload
from zorse_megatron.plan.plan_file import load_plan
from zorse_megatron.planner import find_plan as find_plan_module
from zorse_megatron.planner import shortage
from zorse_megatron.planner.baselines import stock_best
from zorse_megatron.planner.baselines.stock_best import StockSearches
from zorse_megatron.planner.evaluate import Evaluator
from zorse_megatron.planner.find_plan import find_plan
from zorse_megatron.planner.gpu_selection import explore
from zorse_megatron.planner.inputs.search_inputs import on_ranks
from zorse_megatron.planner.outcome import NoPlanError, SearchStats
from zorse_megatron.planner.search.zorse_search import SearchResult
from zorse_megatron.planner.simulate_plan import simulate_plan

# The T4s are so slow that every layout is faster without them.
LAB = """
nodes:
  - {name: old, gpus: 2 x T4, nics: 1 Gb/s}
  - {name: near, gpus: 2 x A100-40, nics: 100 Gb/s}
"""
WORKLOAD = ("--model", "llama-1b", "--global-batch-size", "4", "--seq-length", "512")
PLAN = (
    "plan",
    "--cluster",
    "lab.yaml",
    *WORKLOAD,
    "--dtype",
    "float16",
    "--max-tp",
    "1",
)
STOCK = (*PLAN, "--strategy", "stock")


@pytest.fixture
def run(run, tmp_path):
    (tmp_path / "lab.yaml").write_text(LAB)
    return run


def found_nothing(*_):
    considered = SearchStats()
    return SearchResult(evaluations=[], considered=considered)


def no_plan(*_):
    return NoPlanError("none", [Problem(where="a", found="b", expected="c", remedy="d")])


def fits_this_runtime(inputs, layout):
    """Whether transfers that are under way while it computes leave room."""
    part = on_ranks(inputs, layout.gpu_ranks)
    peaks = simulate_plan(part, layout.plan_on(part)).peak_memory_bytes
    return all(peak <= limit for peak, limit in zip(peaks, part.capacities_bytes, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("make", [random_nodes, random_case])
def test_what_stock_can_do_is_found_even_if_nothing_else_is(make, monkeypatch):
    """In any order, on any GPUs: without a plan of the search it is no slower than stock."""
    monkeypatch.setattr(find_plan_module, "search_with_tp", found_nothing)
    monkeypatch.setattr(find_plan_module, "no_plan", no_plan)
    num_fewer = num_reordered = 0
    for seed in range(4):
        inputs = make(seed)
        searches = StockSearches(inputs)
        best = searches.at_best().best.fitting
        if best is None or not fits_this_runtime(inputs, best):
            continue
        num_fewer += len(best.ranks) < inputs.world_size
        num_reordered += best.ranks != best.gpu_ranks

        def iteration_s(ranks, inputs=inputs, searches=searches):
            try:
                return find_plan(on_ranks(inputs, ranks), stock=searches.on(ranks)).iteration_s
            except NoPlanError:
                return math.inf

        found, *_ = explore(
            inputs,
            iteration_s,
            part_of=lambda ranks, inputs=inputs: on_ranks(inputs, ranks),
            short=lambda ranks: math.inf,
            stock_s={best.gpu_ranks: best.iteration_s},
        )
        assert found.iteration_s <= best.iteration_s * (1 + 1e-9)
    assert num_fewer and num_reordered


@pytest.mark.parametrize(("stock_s", "used"), [(9.99, 1), (9.999, 1), (10.0, 2)])
def test_gpus_that_stock_is_faster_on_are_searched(stock_s, used):
    """Also where fewer GPUs are faster by less than is worth leaving others out otherwise."""
    inputs = cluster_of(("fast",), ("slow",))
    searched = []

    def known(ranks):
        searched.append(ranks)
        return 10.0 if len(ranks) == 2 else stock_s

    point, *_ = explore(
        inputs,
        known,
        part_of=lambda ranks: on_ranks(inputs, ranks),
        short=lambda ranks: math.inf,
        stock_s={(0,): stock_s},
    )
    assert len(point.ranks) == used
    assert len(set(searched)) == len(searched)


def test_what_may_be_kept_in_the_host_makes_no_plan_slower(monkeypatch):
    """Small changes make the plan without it the faster one, which was second before."""
    inputs = cluster_of(("fast", "fast"))
    layouts = StockSearches(inputs).on((0, 1))
    kept = find_plan(inputs, stock=layouts).plan

    def in_host(plan):
        offload = Offload(activations=True)
        return [group.offload == offload for group in plan.groups]

    def changed(evaluator, best):
        share = 1.0 if any(in_host(best.plan)) else 0.5
        return dataclasses.replace(best, iteration_s=share * best.iteration_s)

    def searched(each, _progress):
        plan = kept
        if each.space.offload_activations:
            group = dataclasses.replace(kept.groups[0], offload=Offload(activations=True))
            plan = dataclasses.replace(kept, groups=(group, *kept.groups[1:]))
        evaluation = Evaluator(each).evaluate_plan(kept)
        faster_s = 0.9 if each.space.offload_activations else 1.0
        found = dataclasses.replace(evaluation, plan=plan, iteration_s=faster_s)
        return SearchResult(evaluations=[found], considered=found_nothing().considered)

    monkeypatch.setattr(find_plan_module, "search_with_tp", searched)
    monkeypatch.setattr(find_plan_module, "with_changes", changed)
    space = dataclasses.replace(inputs.space, offload_activations=True)
    more = find_plan(dataclasses.replace(inputs, space=space), stock=())
    assert more.iteration_s == find_plan(inputs, stock=()).iteration_s == 0.5


def test_the_strategy_stock_takes_what_unmodified_megatron_is_fastest_with():
    """And changes nothing that Megatron does not have, whatever this runtime would gain by it."""
    inputs = cluster_of(("fast", "slow"), ("middle",))
    space = dataclasses.replace(inputs.space, split_backward=True)
    inputs = dataclasses.replace(inputs, space=space)
    best, *others = StockSearches(inputs).on((0, 1, 2))
    found = find_plan(inputs, strategy="stock", stock=(best, *others))
    plain = dataclasses.replace(found.plan, predictions=None)
    assert plain == best.plan_on(inputs)
    assert [kinds for group in plain.groups for kinds in group.ranks] == list(best.ranks)
    assert dataclasses.replace(find_plan(inputs, strategy="stock").plan, predictions=None) == plain


@pytest.mark.slow
def test_each_set_of_gpus_is_searched_once(run, few_layouts, little_effort):
    """By the answer, the search for GPUs and that for plans together."""
    result = run(*PLAN, "--json")
    assert result.exit_code == 0, result.output
    assert ("T4", "T4", "A100-40", "A100-40") in few_layouts.searched
    assert len(few_layouts.searched) == len(set(few_layouts.searched))
    best = json.loads(result.stdout)["stock"]["best"]
    few_layouts.searched.clear()
    again = json.loads(run(*STOCK, "--json").stdout)
    assert again["stock"]["best"] == best
    assert len(few_layouts.searched) == len(set(few_layouts.searched))


@pytest.mark.slow
@each_search_once()
def test_the_answer_of_the_strategy_stock(run):
    """Unmodified Megatron's time first, its flags, what starts it on the GPUs it is best on."""
    told = run(*STOCK, "--out", "stock.json").stdout
    lines = told.splitlines()
    assert re.match(r"[\d.]+ ms per iteration on unmodified Megatron, [\d,]+ tokens/s", lines[0])
    (runtime,) = (line for line in lines if line.startswith("The same layout on this package's"))
    assert re.search(r": [\d.]+ ms \((as long|[\d.]+ % shorter)\)$", runtime)
    answer = json.loads(run(*STOCK, "--json", "--out", "stock.json").stdout)
    best = answer["stock"]["best"]
    assert answer["iteration_s"] == best["iteration_s"] >= answer["runtime_iteration_s"]
    assert best["hosts"] == [{"name": "near", "gpus": [0, 1]}]
    assert best["ranks"] == answer["used_ranks"] == [2, 3]
    (flags,) = (line for line in lines if line.startswith("flags of stock"))
    assert shlex.split(flags.partition(": ")[2]) == best["flags"]
    assert "GPUs in the order of its ranks: near (0,1)" in lines
    words = shlex.split(answer["next_command"])
    assert words[:4] == ["zorse", "launch", "stock.json", "--stock"]
    assert words[4:8] == ["--cluster", "stock.cluster.yaml", "--torchrun", "--"]
    assert load_plan("stock.json").world_size == 2
    assert not list(Path.cwd().glob("*.stock.*"))


@pytest.mark.parametrize("more", [(), ("--use-all",)])
def test_a_model_that_fits_in_no_layout(more, run, few_layouts, monkeypatch):
    """The closest one is named with what it lacks, and whether a plan fits."""
    for fits in (True, False):
        monkeypatch.setattr(shortage, "fitting", lambda inputs, fits=fits: fits or None)
        too_large = (*STOCK[:3], "--model", "llama-33b", *STOCK[5:])
        result = run(*too_large, "--json", *more)
        answer = json.loads(result.stdout)
        closest, plan = answer["problems"]
        assert closest["where"] == "strategy stock"
        assert re.search(r"memory: .*needs [\d.]+ of [\d.]+ GiB on rank \d", closest["found"])
        assert answer["missing_bytes"] > 0
        assert plan["found"].startswith("a plan" if fits else "no plan")


@pytest.mark.slow
@each_search_once()
def test_stock_beside_the_plan(run, few_layouts, little_effort, tmp_path):
    """Its own cluster file where it leaves GPUs out; both go where they are of another plan."""
    stock, cluster = tmp_path / "plan.stock.json", tmp_path / "plan.stock.cluster.yaml"
    answer = json.loads(run(*PLAN, "--json", "--out", "plan.json").stdout)
    assert (answer["written_stock"], answer["stock_cluster"]) == (stock.name, cluster.name)
    written = load_plan(stock)
    kinds = parse_cluster(cluster.read_bytes()).gpu_kinds
    assert written.cluster.gpu_kinds == kinds == ("A100-40", "A100-40")
    assert run("check", stock.name, cluster.name).exit_code == 0
    assert answer["stock"]["best"]["ranks"] == [2, 3]
    run(*PLAN, "--out", "plan.json", "--use-all")
    assert load_plan(stock).world_size == 4 and not cluster.exists()
    run(*PLAN, "--out", "plan.json", "--strategy", "cephalo")
    assert not stock.exists()
    stock.write_text('{"mine": 1}')
    cluster.write_text("nodes: []\n")
    refused = json.loads(run(*PLAN, "--json", "--out", "plan.json").stdout)
    assert [each["found"] for each in refused["problems"]] == [
        f"{name}, which zorse plan has not written" for name in (stock.name, cluster.name)
    ]
    run(*PLAN, "--out", "plan.json", "--strategy", "cephalo", "--use-all")
    assert stock.read_text() == '{"mine": 1}' and cluster.exists()
    streamed = run(*PLAN, "--json", "--out", "/dev/stdout", "--use-all").stdout
    assert '"written_stock": null' in streamed and '"next_command": null' in streamed


RECOMMENDED = {
    1.0: "No faster than stock Megatron, which needs no plugin: new.stock.json",
    1.007: "Only 0.7 % faster than stock Megatron, which needs no plugin: new.stock.json",
    1.04: "Stock Megatron: 4.16 s in its best layout on 2 A100-40 (4.0 % longer), an even",
}


@pytest.mark.slow
@pytest.mark.usefixtures("few_layouts", "little_effort")
def test_stock_is_recommended_where_a_plan_is_hardly_faster(run, monkeypatch):
    at_best = StockSearches.at_best
    monkeypatch.setattr(plan_answer.Answer, "iteration_s", 4.0)
    with each_search_once():
        for share, said in RECOMMENDED.items():

            def in_share(searches, share=share):
                layout = at_best(searches).best.layout
                layout = dataclasses.replace(layout, iteration_s=4.0 * share)
                stock = stock_best.Stock(layout=layout, reason="")
                return stock_best.StockAtBest(even=stock, best=stock)

            monkeypatch.setattr(StockSearches, "at_best", in_share)
            told = run(*PLAN, "--tokens", "1T", "--out", "new.json")
            lines = told.stdout.splitlines()
            assert any(line.startswith(said) for line in lines), told.output
            of_stock = "zorse launch new.stock.json --stock --cluster new.stock.cluster.yaml"
            assert (of_stock in told.output) == (share < 1.03)
            answer = json.loads(run(*PLAN, "--json").stdout)
            assert answer["stock"]["recommended"] == (share < 1.03)


@pytest.mark.slow
@each_search_once()
def test_stock_on_many_gpus_is_not_computed(run, few_layouts, little_effort, monkeypatch):
    """The answer says so, and the search for plans starts without it."""
    monkeypatch.setattr(stock_best, "MOST_GPUS", 3)
    for more in ((), ("--use-all",)):
        told = run(*PLAN, "--out", "plan.json", *more).stdout
        assert "Stock Megatron: not computed for so many GPUs" in told
        assert not few_layouts.searched and not Path("plan.stock.json").exists()


def test_a_set_that_stock_is_fastest_on_is_searched_even_if_all_gpus_are_faster_than_it():
    """On this runtime the same layout may take less."""
    inputs = random_nodes(1)
    some = tuple(range(inputs.world_size - 1))
    known = {tuple(range(inputs.world_size)): 1.0, some: 0.9}
    found, *_ = explore(
        inputs,
        lambda ranks: known.get(ranks, math.inf),
        part_of=lambda ranks: on_ranks(inputs, ranks),
        short=lambda _: math.inf,
        stock_s={some: 1.02},
    )
    assert found.ranks == some


@pytest.mark.slow
def test_what_fits_is_found_where_no_seed_does(run):
    """The closed form is off on the L4s; stock's next commands are taken as they are printed."""
    cluster = "nodes: [{name: n, gpus: 2 x L4, nics: 25 Gb/s}, {name: m, gpus: [1 x A100-40]"
    Path("lab.yaml").write_text(f"{cluster}, gpu_numbers: [3], nics: 25 Gb/s}}]")
    flags = (
        "--num-layers 26 --hidden-size 3200 --ffn-hidden-size 8640 --num-attention-heads 32 "
        "--swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope "
        "--untie-embeddings-and-output-weights --seq-length 1024 --max-position-embeddings 1024 "
        "--vocab-size 32000 --micro-batch-size 1 --global-batch-size 16 --fp16 --eval-interval 9"
    )
    where = ("--use-all", "--strategy", "stock", "--json", "--out", "p.json")
    told = run("plan", "--cluster", "lab.yaml", *where, "--", *flags.split())
    assert told.exit_code == 0, told.output
    answer = json.loads(told.stdout)
    assert {each["name"]: each["gpus"] for each in answer["stock"]["best"]["hosts"]}["m"] == [3]
    words = shlex.split(answer["next_command"])
    launched = run(*words[1:])
    assert launched.exit_code == 0, launched.output
    assert "CUDA_VISIBLE_DEVICES=3" in launched.output


@pytest.mark.slow
@pytest.mark.usefixtures("little_effort")
@pytest.mark.parametrize("more", [(), ("--use-all",)])
def test_all_layouts_that_are_found_are_tried_on_this_runtime(run, monkeypatch, more):
    """It may order them otherwise."""
    given = []

    def find_plan_with(inputs, *, stock, plain=find_plan, **options):
        given.append(len(dict.fromkeys(each.grid for each in stock)))
        return plain(inputs, stock=stock, **options)

    monkeypatch.setattr(find_plan_module, "find_plan", find_plan_with)
    assert run(*PLAN, *more).exit_code == 0
    assert min(given) > 1
