"""Stock's layouts with expert parallelism: what they take and hold, against counts by hand."""

import itertools
import json
from dataclasses import replace

import pytest

from tests.topologies import node
from tests.unit.test_expert_costs import EXPERT, HIDDEN, MODEL, NUMBER, TOKENS
from zorse_megatron.costs.communication import GraphComm
from zorse_megatron.costs.stage_formulas import exchanges_s
from zorse_megatron.costs.topology import Topology
from zorse_megatron.emulate.compare import compared_systems
from zorse_megatron.errors import PlanError
from zorse_megatron.inputs.cluster_yaml import parse_cluster
from zorse_megatron.inputs.model import Experts
from zorse_megatron.plan.divided_replicas import replicas_that_share_experts
from zorse_megatron.plan.plan_file import load_plan
from zorse_megatron.plan.rules import problems_of
from zorse_megatron.planner.baselines.stock_best import (
    StockSearches,
    stock_at_best,
    stock_plans,
    stock_runs,
)
from zorse_megatron.planner.baselines.stock_costs import GridCosts
from zorse_megatron.planner.baselines.stock_layouts import (
    Grid,
    expert_degrees,
    may_run,
    plan_of_grid,
)
from zorse_megatron.planner.baselines.stock_plans import grid_of_plan, layout_flags
from zorse_megatron.planner.baselines.stock_search import StockSearch, framework_of
from zorse_megatron.planner.evaluate import Evaluator
from zorse_megatron.planner.find_plan import find_plan
from zorse_megatron.planner.inputs.search_inputs import make_inputs
from zorse_megatron.planner.simulate_plan import simulate_plan
from zorse_megatron.schedule.actions import Kind
from zorse_megatron.schedule.lower import lower_plan
from zorse_megatron.simulate.action_costs import ActionCosts
from zorse_megatron.simulate.assumptions import STOCK_1F1B, STOCK_INTERLEAVED
from zorse_megatron.simulate.network import NetworkLoads
from zorse_megatron.simulate.rank_bytes import RankSizes

ONE_NODE = b"nodes:\n  - {name: a, gpus: 4 x A100-40, link: NVSwitch 200 GB/s, nics: 100 Gb/s}\n"
TWO_NODES = b"nodes:\n  - {name: a, count: 2, gpus: 2 x A100-40, nics: 50 Gb/s}\n"
FOUR_NODES = b"nodes:\n  - {name: a, count: 4, gpus: 1 x A100-40, nics: 10 Gb/s}\n"
ODD = b"nodes:\n  - {name: a, gpus: [3 x A100-40, 1 x T4], nics: 100 Gb/s}\n"
MIXED = b"nodes:\n  - {name: a, gpus: [2 x A100-40, 2 x T4], nics: 100 Gb/s}\n"
BANDWIDTH = 1555e9


def inputs_of(text=ONE_NODE, model=MODEL, batch=16, dtype="float16", **how):
    return make_inputs(
        parse_cluster(text), model, None, global_batch_size=batch, dtype=dtype, **how
    )


def grid(stages, degree, width=4, **changes):
    layers = (4 // stages,) * stages
    usual = Grid(layers=layers, width=width, micro_batch_size=2, mode="none")
    return replace(usual, expert_parallel=degree, **changes)


def simulated(inputs, one, **options):
    plan = plan_of_grid(inputs, one, is_written=False)
    return simulate_plan(inputs, plan, framework=framework_of(one), **options)


def costs_of(inputs, one):
    plan = plan_of_grid(inputs, one, is_written=False)
    return ActionCosts(RankSizes(plan, inputs, framework_of(one)), NetworkLoads(inputs.comm))


# Bytes of an exchange.


@pytest.mark.parametrize("place", [(0, 0, 0, 1), (0, 0, 1, 1)])
def test_a_token_crosses_once_to_a_rank_and_once_to_a_node(place):
    """Ranks on two nodes, two of eight experts each; two per token."""
    inside, nic, ranks = 80e9, 10e9, (0, 1, 2, 3)
    made = [node(f"n{at}", place.count(at), link_latency_s=0.0) for at in (0, 1)]
    nodes = [replace(each, nics=replace(each.nics, latency_s=0.0)) for each in made]
    comm = GraphComm(Topology.of(tuple(nodes)))
    experts, tokens, token_bytes = Experts(num_experts=8, per_token=2, ffn_hidden_size=1), 28, 3000
    choices = list(itertools.combinations(range(8), 2))
    assert len(choices) == tokens, "each choice once"
    to_rank, leaving = dict.fromkeys(ranks, 0), [0, 0]
    for source, choice in itertools.product(ranks, choices):
        owners = {expert // 2 for expert in choice} - {source}
        for owner in owners:
            to_rank[owner] += token_bytes * (place[owner] == place[source])
        leaving[place[source]] += token_bytes * bool({place[o] for o in owners} - {place[source]})
    found_s = comm.tokens_s(
        ranks, lambda count: tokens * token_bytes * experts.share_of_tokens(2 * count)
    )
    by_hand_s = max(max(to_rank.values()) / inside, max(leaving) / nic)
    assert found_s == pytest.approx(by_hand_s, rel=1e-9)
    assert found_s > max(to_rank.values()) / inside  # the NIC decides


def test_exchanges_are_counted_and_hidden():
    assert exchanges_s(10.0, 0.5, 4, hides=False) == (4.0, 2.0)  # 2 and 1 of each layer
    assert exchanges_s(10.0, 0.5, 4, 3, hides=False) == (4.0, 5.0)  # and 2 of those done again
    assert exchanges_s(10.0, 0.5, 4, hides=True) == (0.0, 0.0)  # 4 of each layer, for 8 s
    assert sum(exchanges_s(6.0, 0.5, 4, hides=True)) == pytest.approx(2.0)
    assert sum(exchanges_s(0.0, 0.5, 4, hides=True)) == pytest.approx(6.0)  # no more than without
    assert exchanges_s(1.0, 0.0, 4, hides=True) == (0.0, 0.0)


@pytest.mark.parametrize("degree", [2, 4])
def test_a_pass_reads_its_own_experts_and_exchanges_tokens(degree):
    """Of 12 bytes for each parameter of experts that a rank has not, nothing is moved."""
    inputs, one = inputs_of(), grid(1, degree)
    two = replace(one, layers=(2, 2), width=2)
    lacking = (NUMBER - NUMBER // degree) * EXPERT
    for each in (one, *([two, replace(two, mode="full")] if degree == 2 else [])):
        with_all = costs_of(inputs, replace(each, expert_parallel=1))
        costs, layers = costs_of(inputs, each), each.layers[0]
        once_s = costs.sizes.once_s(0, 0, 2 * TOKENS * HIDDEN * 2)
        assert once_s > 0
        hidden = each is one  # a single stage: behind other micro-batches
        again = each.mode == "full"
        spared = {Kind.FORWARD: 2, Kind.BACKWARD: 10 + 2 * again}
        sent = {Kind.FORWARD: 2, Kind.BACKWARD: 1 + 2 * again}
        for kind in (Kind.FORWARD, Kind.BACKWARD):
            (before_s,) = with_all.seconds(0, 0, kind, 2, splits=False)
            (found_s,) = costs.seconds(0, 0, kind, 2, splits=False)
            spared_s = layers * spared[kind] * lacking / BANDWIDTH
            sent_s = 0.0 if hidden else layers * sent[kind] * once_s
            assert found_s == pytest.approx(before_s - spared_s + sent_s, rel=1e-9)


def test_ranks_that_share_experts_wait_for_the_slowest():
    inputs = inputs_of(MIXED)
    alone, pairs, all_four = (costs_of(inputs, grid(1, degree)) for degree in (1, 2, 4))
    fast, slow = (alone.seconds(rank, 0, Kind.FORWARD, 2, splits=False)[0] for rank in (0, 2))
    assert fast < slow / 3
    found = [pairs.seconds(rank, 0, Kind.FORWARD, 2, splits=False)[0] for rank in range(4)]
    assert found[0] == found[1] < found[2] / 2 and found[2] == found[3]
    together = [all_four.seconds(rank, 0, Kind.FORWARD, 2, splits=False)[0] for rank in range(4)]
    assert len(set(together)) == 1 and together[0] > 2 * found[0]


# What ranks hold and sum.


@pytest.mark.parametrize(("stages", "degree"), [(1, 2), (1, 4), (2, 2)])
def test_a_rank_holds_its_experts_and_owns_an_equal_part_of_all(stages, degree):
    inputs, one = inputs_of(), grid(stages, degree, 4 // stages)
    peaks = {
        each: simulated(inputs, replace(one, expert_parallel=each)).peak_memory_bytes
        for each in (1, degree)
    }
    lacking = one.layers[0] * (NUMBER - NUMBER // degree) * EXPERT
    # Parameters in 16 bits, gradients in fp32; all of the state is somebody's.
    assert {a - b for a, b in zip(*peaks.values(), strict=True)} == {(2 + 4) * lacking}
    replicated = [
        simulated(inputs, replace(one, expert_parallel=each, distributed=False)).peak_memory_bytes
        for each in (1, degree)
    ]
    assert {a - b for a, b in zip(*replicated, strict=True)} == {(2 + 4 + 12) * lacking}


@pytest.mark.parametrize("degree", [1, 2, 4])
def test_only_ranks_with_the_same_experts_sum_their_gradients(degree):
    inputs, rate = inputs_of(), 200e9
    latency_s = inputs.spec.nodes[0].link.latency_s
    experts = 4 * NUMBER * EXPERT
    every = costs_of(inputs, grid(1, degree))
    others = every.sizes.parameters[0] - experts
    ring_s = 4 * others * 3 / 4 / rate + 3 * latency_s
    if degree == 1:
        ring_s += 4 * experts * 3 / 4 / rate
    elif degree == 2:  # two rings of two, in parallel
        ring_s += 4 * experts / 2 / 2 / rate + latency_s
    work = every.collective(Kind.REDUCE_GRAD, 0, (0, 1, 2, 3))
    assert work.alone_s == pytest.approx(ring_s, rel=1e-5)  # shards are whole elements


def test_rings_of_several_experts_share_a_nic():
    inputs = inputs_of(TWO_NODES)
    works = {each: costs_of(inputs, grid(1, each)) for each in (1, 2, 4)}
    took_s = {
        degree: costs.collective(Kind.REDUCE_GRAD, 0, (0, 1, 2, 3)).alone_s
        for degree, costs in works.items()
    }
    others_s = took_s[4]
    # A pair of ranks for each half of the experts: as much crosses as around one ring of four,
    # of whose buffer three quarters pass each link, and not a half.
    ring_s = 4 * 4 * NUMBER * EXPERT * 3 / 4 / 6.25e9
    assert took_s[1] - others_s == pytest.approx(ring_s, rel=1e-3)
    assert took_s[2] - others_s == pytest.approx(ring_s * 2 / 3, rel=1e-3)


# Layouts.


def test_without_it_layouts_are_those_that_they_were():
    inputs = inputs_of(MIXED)
    found = StockSearch(inputs).run()
    assert found and {each.grid.expert_parallel for each in found} == {1}
    for each in found:
        plan, by_name = plan_of_grid(each.inputs, each.grid), STOCK_1F1B
        if each.grid.virtual > 1:
            by_name = STOCK_INTERLEAVED
        if each.grid.distributed:
            result = simulate_plan(each.inputs, plan, framework=by_name)
            assert result.iteration_s == each.iteration_s
            assert "stock_expert_parallel" not in plan.schedule.parameters
    dense = inputs_of(model=replace(MODEL, experts=None))
    assert expert_degrees(dense, 8) == [1] and expert_degrees(inputs, 12) == [1, 2, 4]
    assert not StockSearch(dense, spreads_experts=True).run()


@pytest.mark.parametrize("text", [MIXED, TWO_NODES, ODD])
@pytest.mark.parametrize(("stages", "degree"), [(1, 2), (1, 4), (2, 2)])
def test_equal_ranks_are_simulated_once(text, stages, degree):
    inputs, one = inputs_of(text), grid(stages, degree, 4 // stages)
    every, merged = (simulated(inputs, one, merge_equal_ranks=merge) for merge in (False, True))
    assert merged.iteration_s == pytest.approx(every.iteration_s, rel=1e-12)
    assert merged.peak_memory_bytes == every.peak_memory_bytes


def test_ranks_are_not_equal_that_wait_for_others():
    """Three GPUs of a kind, one of which shares experts with a slower one."""
    assert simulated(inputs_of(ODD), grid(1, 1), merge_equal_ranks=True).stands_in == (0, 0, 0, 3)
    assert simulated(inputs_of(ODD), grid(1, 2), merge_equal_ranks=True).stands_in == (0, 0, 2, 3)


def test_layouts_are_plans_with_and_without_it():
    """Of layouts that differ in expert parallelism alone."""
    inputs = inputs_of()
    (layout, *_) = StockSearch(inputs, spreads_experts=True).run()
    plain = replace(layout, site=replace(layout.site, grid=grid(2, 1, 2)))
    spread = replace(layout, site=replace(layout.site, grid=grid(2, 2, 2)))
    evaluator = Evaluator(inputs)
    found = stock_plans(evaluator, [spread, plain])
    assert all(each.plan.schedule.parameters == {} and each.iteration_s > 0 for each in found)
    assert [any(replicas_that_share_experts(each.plan)) for each in found] == [True, False]
    assert [
        len(each.plan.schedule.parameters) for each in stock_runs(evaluator, [spread, plain])
    ] == [1, 0]


def test_closed_form_and_simulator_agree_on_it():
    """Slowest stage, and memory, of a single stage and of two."""
    inputs, far = inputs_of(batch=64), inputs_of(FOUR_NODES, batch=256)
    full = grid(2, 2, 2, mode="full")
    assert far.comm.transfer_s(0, 1, 10**6) > 10 * inputs.comm.transfer_s(0, 1, 10**6)
    for inputs, one in (
        *((inputs, each) for each in (grid(1, 2), grid(1, 4), grid(2, 2, 2), full)),
        *((far, each) for each in (grid(2, 2, 2), full)),
    ):
        estimate = GridCosts(inputs, 1, one.expert_parallel).estimate(one)
        result = simulated(inputs, one)
        assert estimate.iteration_s == pytest.approx(result.iteration_s, rel=0.05)
        busiest = max(result.peak_memory_bytes) / inputs.capacities_bytes[0]
        assert estimate.fullest == pytest.approx(busiest, abs=0.02)


def test_a_layout_is_read_back_and_started_but_not_run_here():
    inputs, one = inputs_of(), grid(2, 2, 2)
    assert may_run(inputs, one) and not may_run(inputs, replace(one, expert_parallel=4))
    plan = plan_of_grid(inputs, one)
    assert grid_of_plan(plan, [range(4)]) == (one, (0, 1, 2, 3))
    flags = " ".join(layout_flags(one))
    assert "--expert-model-parallel-size 2" in flags and "EP 2" in one.description
    assert "--expert-model" not in " ".join(layout_flags(replace(one, expert_parallel=1)))
    with pytest.raises(PlanError, match="zorse launch --stock"):
        lower_plan(plan)
    assert not problems_of(plan)
    for wrong in ("0", "3", "-1", "two", "4"):
        odd = replace(plan, schedule=replace(plan.schedule, parameters={NAME: wrong}))
        (problem,) = problems_of(odd)
        assert problem.where == f"schedule.parameters.{NAME}" and repr(wrong) in problem.found
    other = replace(plan.schedule, name="breadth_first", parameters={NAME: "2"})
    assert any(NAME in each.where for each in problems_of(replace(plan, schedule=other)))


NAME = "stock_expert_parallel"


# A cluster whose GPUs have no room for all experts of a layer.

WIDE = replace(
    MODEL,
    num_layers=2,
    hidden_size=2048,
    ffn_hidden_size=8192,
    experts=Experts(num_experts=16, per_token=2, ffn_hidden_size=8192),
)
"""Two layers for four GPUs: without expert parallelism a GPU has 6 bytes of a whole layer."""
SHORT = b"""
gpu_kinds:
  - {name: small, like: A100-40, memory: 10GB}
nodes:
  - {name: a, gpus: 4 x small, link: NVSwitch 200 GB/s, nics: 100 Gb/s}
"""


def test_stock_spreads_experts_that_do_not_fit():
    inputs = inputs_of(SHORT, WIDE)
    searches = StockSearches(inputs)
    assert not StockSearch(inputs).run() and searches.on((0, 1, 2, 3))
    found = stock_at_best(inputs)
    best = found.best.fitting
    assert best.grid.expert_parallel > 1 and found.even.fitting.grid.expert_parallel > 1
    again = simulated(best.inputs, best.grid)
    assert again.iteration_s == pytest.approx(best.iteration_s, rel=1e-12)
    assert again.peak_memory_bytes == best.peaks_bytes
    (even, row) = compared_systems(inputs, ["stock"], None)
    assert row.system is None and row.iteration_s == best.iteration_s
    assert "no expert parallelism" in row.reason and even.system is None
    outcome = find_plan(inputs, strategy="stock")
    assert outcome.plan.schedule.parameters[NAME] == str(best.grid.expert_parallel)
    assert outcome.iteration_s == pytest.approx(best.iteration_s, rel=1e-12)


def training_of(model):
    """The words of a training command."""
    flags, switches = model.flags()
    words = [str(word) for pair in flags.items() for word in pair] + switches
    words += ["--global-batch-size", "16", "--bf16", "--eval-interval", "1000"]
    return ("pretrain_gpt.py", *words, "--attention-dropout", "0", "--hidden-dropout", "0")


@pytest.mark.usefixtures("little_effort")
def test_where_no_plan_fits_the_answer_says_that_stock_does(run, tmp_path):
    """Neither in the GPUs nor in the host."""
    text = SHORT.replace(b"nics:", b"host_memory: 1 GB, nics:")
    (tmp_path / "short.yaml").write_bytes(text)
    training = training_of(WIDE)
    made = run("plan", "--cluster", "short.yaml", "--max-tp", "1", "--use-all", "--", *training)
    said = " ".join(made.output.split())
    assert made.exit_code == 1 and "stock Megatron: found a layout that fits, 4 small: " in said
    assert "EP 2" in said and "zorse plan --strategy stock" in said


@pytest.mark.usefixtures("little_effort")
def test_the_answer_says_that_stock_is_faster(run, tmp_path):
    (tmp_path / "short.yaml").write_bytes(SHORT)
    training = training_of(WIDE)
    cluster = ("--cluster", "short.yaml")
    made = run("plan", *cluster, "--out", "p.json", "--", *training)
    assert made.exit_code == 0, made.output
    said = " ".join(made.stdout.split())
    assert "with expert parallelism of" in said and "shorter" in said
    assert "slower than stock Megatron, which needs no plugin: p.stock.json" in said
    assert "flags of stock Megatron: " in said and "--expert-model-parallel-size" in said
    assert NAME not in load_plan(tmp_path / "p.json").schedule.parameters
    assert NAME in load_plan(tmp_path / "p.stock.json").schedule.parameters
    launched = run("launch", "p.stock.json", "--stock", *cluster, "--torchrun", "--", *training)
    assert launched.exit_code == 0 and "--expert-model-parallel-size" in launched.stdout
    other = ("--expert-model-parallel-size", "16")
    spread = run(
        "launch", "p.stock.json", "--stock", *cluster, "--torchrun", "--", *training, *other
    )
    assert spread.exit_code != 0 and "as the layout has" in spread.output
    for command in ("check", "launch"):
        rest = () if command == "check" else (*cluster, "--torchrun", "--", *training)
        refused = run(command, "p.stock.json", *rest)
        assert refused.exit_code != 0 and "expert parallelism" in refused.output
    stock = ("plan", *cluster, "--strategy", "stock")
    answer = json.loads(run(*stock, "--json", "--", *training).stdout)
    assert answer["stock"]["best"]["iteration_s"] == answer["iteration_s"]
    page = run(*stock, "--html", "page.html", "--out", "s.json", "--", *training)
    assert page.exit_code == 0 and "at least, with expert parallelism" in page.stdout, page.output
    assert (tmp_path / "page.html").exists()
