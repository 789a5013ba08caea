"""Uneven routing: what experts' ranks compute, receive and keep, against all choices and draws."""

import itertools
import json
import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from typer.testing import CliRunner

from tests.unit.test_expert_costs import CHOSEN, EXPERT, HIDDEN, MODEL, NUMBER, TOKENS
from tests.unit.test_shared_experts import LAYERS, costs_of, plan_of, sharing
from tests.unit.test_stock_expert_parallel import MIXED, ONE_NODE, inputs_of
from zorse_megatron.cli.main import app
from zorse_megatron.costs.interface import TpShard
from zorse_megatron.costs.shared_experts import ExpertLoad, parts_of
from zorse_megatron.inputs.model import flags_of_shape
from zorse_megatron.plan.divided_replicas import replicas_that_share_experts
from zorse_megatron.plan.plan import ExpertParallel, Replica, TpShards
from zorse_megatron.plan.plan_file import save_plan
from zorse_megatron.planner.find_plan import find_plan
from zorse_megatron.planner.inputs.cost_models import told_local_sizes
from zorse_megatron.planner.inputs.search_inputs import with_load
from zorse_megatron.planner.simulate_plan import simulate_plan

WEIGHTS = np.array([1.0 + 7.0 * ((5 * at) % NUMBER == 0) + 0.2 * at for at in range(NUMBER)])
EXPERTS = (7, 0, 8, 1)
OWNER = np.repeat(range(4), EXPERTS)
SHARED = sharing(range(4), EXPERTS, (1, 2, 1, 0), 4)


def tp_groups(experts):
    return tuple(
        Replica(
            ranks=ranks,
            micro_batch_size=1,
            num_microbatches=8,
            shard_weight=1.0,
            tp_shards=TpShards(experts=experts),
        )
        for ranks in ((0, 1), (2, 3))
    )


APART = tuple(
    Replica(ranks=(rank,), micro_batch_size=2, num_microbatches=2, shard_weight=1.0)
    for rank in range(4)
)


def all_choices():
    """Every choice of a token, and how likely it is."""
    choices = np.array(list(itertools.combinations(range(NUMBER), CHOSEN)))
    likely = WEIGHTS[choices].prod(axis=1)
    return choices, likely / likely.sum()


def load_of_choices():
    choices, likely = all_choices()
    loads = np.zeros(NUMBER)
    np.add.at(loads, choices, likely[:, None] / CHOSEN)
    return ExpertLoad(shares=tuple(map(float, loads)))


def simulated(inputs, replicas):
    return simulate_plan(inputs, plan_of(inputs, *replicas))


# Tokens and rows.


def test_tokens_of_each_rank_are_those_of_all_choices():
    """Of loads alone it follows which choices are made how often; each is counted."""
    choices, likely = all_choices()
    load = load_of_choices()
    for rank, part in enumerate(parts_of(EXPERTS)):
        passing = (OWNER[choices] == rank).any(axis=1)
        assert load.tokens(part, CHOSEN) == pytest.approx(likely[passing].sum(), abs=1e-7)
        mine = (OWNER[choices] == rank).sum(axis=1)
        assert load.rows(part) == pytest.approx((likely * mine).sum() / CHOSEN, abs=1e-12)


@pytest.mark.parametrize(("number", "per_token", "busiest"), [(16, 4, 2.5), (64, 8, 4.0)])
def test_tokens_drawn_by_their_best_scores_go_where_the_formula_says(number, per_token, busiest):
    """A router's way: the best of scores with noise. Its loads are counted as a log has them."""
    random, tokens = np.random.default_rng(0), 50_000
    scores = random.permutation(np.log(ExpertLoad.falling(busiest, number).shares))
    noisy = scores + random.gumbel(size=(tokens, number))
    chosen = np.argpartition(-noisy, per_token, axis=1)[:, :per_token]
    counts = np.bincount(chosen.ravel(), minlength=number)
    load = ExpertLoad(shares=tuple(map(float, counts / counts.sum())))
    for part in parts_of((number // 2 - 3, 3, number // 4, 1, number // 4 - 1)):
        is_here = (chosen >= part.start) & (chosen < part.stop)
        assert load.rows(part) == pytest.approx(is_here.sum() / chosen.size, rel=1e-9)
        drawn = is_here.any(axis=1).mean()
        error = math.sqrt(drawn * (1 - drawn) / tokens)
        assert load.tokens(part, per_token) == pytest.approx(drawn, abs=4 * error + 1 / tokens)


@pytest.mark.parametrize("busiest", [1.0, 1.5, 3.0, 4.0])
def test_falling_loads_have_the_ratio_that_is_said(busiest):
    load = ExpertLoad.falling(busiest, NUMBER)
    assert load.shares[0] * NUMBER == pytest.approx(busiest)
    assert sum(load.shares) == pytest.approx(1.0)
    ratios = [after / before for before, after in itertools.pairwise(load.shares)]
    assert ratios == pytest.approx([ratios[0]] * (NUMBER - 1))
    assert load.is_even == (busiest == 1.0)
    # Any rank may have the first ones.
    for of_experts in (load.rows, lambda experts: load.tokens(experts, CHOSEN)):
        assert of_experts(range(9, 12)) == of_experts(range(3))
    # At the limit every token passes the first one.
    if busiest == NUMBER / CHOSEN:
        assert load.tokens(range(1), CHOSEN) == pytest.approx(1.0)


# Costs.


def test_exchanges_have_the_bytes_of_all_choices():
    inputs = with_load(inputs_of(MIXED, batch=16), load_of_choices())
    costs = costs_of(inputs, plan_of(inputs, SHARED))
    choices, likely = all_choices()
    there, told = {}, {}
    for source, target in itertools.permutations(range(4), 2):
        passing = likely[(OWNER[choices] == target).any(axis=1)].sum()
        if own := SHARED.expert_parallel.samples[source] * TOKENS:
            there[source, target] = own * 2 * HIDDEN * passing
            told[source, target] = own * 4 * CHOSEN
    back = {pair[::-1]: number for pair, number in there.items()}
    there_s, back_s, told_s = (
        costs.loads.exchanges([(each, 1)]).alone_s for each in (there, back, told)
    )
    found = costs.tp_collectives((0, 1, 2, 3), 0, 4, gathers=False)
    assert found.forward_s == pytest.approx(LAYERS * (there_s + back_s + 2 * told_s), rel=1e-6)


def test_a_rank_computes_and_keeps_the_rows_of_its_experts():
    """As many rows of twice as many samples cost the same; rows of all ranks are all rows."""
    even, shared = inputs_of(), ExpertParallel(experts=(4, 12), samples=(8, 8))
    uneven = with_load(even, ExpertLoad(shares=(0.2, *[0.1] * 3, *[0.5 / 12] * 12)))
    part, rest = (TpShard(shared=shared, index=index) for index in range(2))
    mine, usual = (each.tp_costs.of_rank(part, None) for each in (uneven, even))
    for size in (16, 48):
        at_half = mine.compute.layer_in_two("A100-40", size).mlp
        at_quarter = usual.compute.layer_in_two("A100-40", 2 * size).mlp
        # A router's matrix and norms are in both differences.
        assert at_half.forward_s == pytest.approx(at_quarter.forward_s, rel=1e-6)
        assert at_half.backward_s == pytest.approx(at_quarter.backward_s, rel=1e-6)
    kept = [
        sum(each.tp_costs.of_rank(at, None).memory.activation_bytes(16, "none") for at in parts)
        for each, parts in ((uneven, (part, rest)), (even, (part, rest)))
    ]
    assert kept[0] == pytest.approx(kept[1], abs=2)
    assert mine.memory.activation_bytes(16, "none") > usual.memory.activation_bytes(16, "none")
    assert mine.memory.arriving_bytes(16) == 2 * usual.memory.arriving_bytes(16)
    assert mine.memory.layer_parameters() == usual.memory.layer_parameters()


def test_a_rank_of_a_tp_group_computes_the_rows_of_its_experts():
    part = TpShard(degree=2, tp_shards=TpShards(experts=(12, 4)), index=1)
    told = told_local_sizes(MODEL, part, lambda experts: 0.1 * len(experts))
    usual = told_local_sizes(MODEL, part)
    more = told.layer_matrix_parameters(2) - usual.layer_matrix_parameters(2)
    assert more == pytest.approx((0.4 - 0.25) * CHOSEN * EXPERT, abs=2)
    assert told.layer_parameters(2) == usual.layer_parameters(2)


def test_a_rank_of_stock_computes_the_rows_of_the_busiest_experts():
    """Where four ranks spread them, with samples of their own."""
    part = TpShard(expert_parallel=4)
    told = told_local_sizes(MODEL, part, lambda experts: 0.1 * len(experts))
    more = told.layer_matrix_parameters() - told_local_sizes(MODEL, part).layer_matrix_parameters()
    assert more == pytest.approx(0.6 * CHOSEN * EXPERT, abs=2)


@pytest.mark.parametrize("load", [ExpertLoad.falling(1.0, 11), ExpertLoad(shares=(1 / 11,) * 11)])
@pytest.mark.parametrize(
    "replicas", [(sharing(range(4), (1, 0, 5, 5), (1, 2, 1, 0), 4),), tp_groups((10, 1))]
)
def test_equal_loads_are_even_routing_to_the_bit(replicas, load):
    experts = replace(MODEL.experts, num_experts=11)
    inputs = inputs_of(MIXED, replace(MODEL, experts=experts))
    before, after = (simulated(each, replicas) for each in (inputs, with_load(inputs, load)))
    assert after.iteration_s == before.iteration_s
    assert after.peak_memory_bytes == before.peak_memory_bytes
    assert after.usage == before.usage


def test_ranks_that_have_all_experts_do_not_depend_on_routing():
    inputs = inputs_of(MIXED)
    uneven = with_load(inputs, ExpertLoad.falling(3.5, NUMBER))
    before, after = (simulated(each, APART) for each in (inputs, uneven))
    assert after.iteration_s == before.iteration_s
    assert after.peak_memory_bytes == before.peak_memory_bytes


@pytest.mark.parametrize("replicas", [(SHARED,), tp_groups((12, 4))], ids=["shared", "divided"])
def test_no_order_of_the_experts_takes_longer_than_is_told(replicas):
    inputs, load = inputs_of(MIXED), ExpertLoad.falling(2.5, NUMBER)
    told = simulated(with_load(inputs, load), replicas)
    random, slowest_s = np.random.default_rng(1), 0.0
    orders = [random.permutation(NUMBER) for _ in range(20)]
    orders += [np.roll(range(NUMBER), start) for start in (0, 4, 7, 12, 15)]
    for order in orders:
        shares = tuple(load.shares[at] for at in order)
        found = simulated(with_load(inputs, ExpertLoad(shares=shares)), replicas)
        assert found.iteration_s <= told.iteration_s
        for mine, most in zip(found.peak_memory_bytes, told.peak_memory_bytes, strict=True):
            assert mine <= most
        slowest_s = max(slowest_s, found.iteration_s)
    assert slowest_s > simulated(inputs, replicas).iteration_s


@pytest.mark.usefixtures("little_effort")
def test_the_plan_found_for_a_load_is_the_fastest_under_it():
    """That for even routing has ranks that share experts."""
    even = inputs_of(ONE_NODE)
    uneven = with_load(even, ExpertLoad.falling(3.0, NUMBER))
    usual, found = find_plan(even).plan, find_plan(uneven)
    assert any(replicas_that_share_experts(usual))
    assert not any(replicas_that_share_experts(found.plan))
    assert found.iteration_s < 0.95 * simulate_plan(uneven, usual).iteration_s


# The commands.


@pytest.fixture
def explain(tmp_path, zorse):
    """`zorse explain` of a plan whose ranks share experts."""
    path = tmp_path / "plan.json"
    save_plan(plan_of(inputs_of(MIXED, batch=16), SHARED), path)
    return partial(zorse, "explain", str(path))


@pytest.fixture
def zorse(tmp_path):
    """A command for the model."""
    cluster = tmp_path / "cluster.yaml"
    cluster.write_bytes(MIXED)

    def run(command, *more):
        flags = [*flags_of_shape(MODEL), "--fp16", "--accumulate-allreduce-grads-in-fp32"]
        flags += ["--global-batch-size", "16", "--attention-dropout", "0", "--hidden-dropout", "0"]
        words = [command, *more, "--cluster", str(cluster), "--", *flags]
        return CliRunner().invoke(app, words)

    return run


def test_explain_tells_even_and_uneven_routing_beside_each_other(explain):
    alone = json.loads(explain("--json").stdout)
    found = json.loads(explain("--json", "--expert-load", "3").stdout)
    uneven = found.pop("expert_load")
    assert found == alone
    inputs = inputs_of(MIXED, batch=16)
    expected = simulated(with_load(inputs, ExpertLoad.falling(3.0, NUMBER)), (SHARED,))
    assert uneven["iteration_s"] == pytest.approx(expected.iteration_s)
    assert uneven["iteration_s"] > 1.1 * alone["iteration_s"]
    listed = ",".join(str(round(1e6 * share)) for share in load_of_choices().shares)
    text = explain("--expert-load", listed).stdout
    assert f"With --expert-load {listed} one iteration takes " in text.replace("\n", " ")
    assert text.count("Peak memory") == 2


@pytest.mark.usefixtures("little_effort")
def test_plans_are_found_for_a_load_in_any_order(zorse):
    def plan(load):
        return zorse("plan", "--expert-load", load, "--use-all", "--no-split-backward")

    result = plan("2.5")
    assert result.exit_code == 0, result.output
    assert "for routing as uneven as --expert-load 2.5 says" in result.stdout.replace("\n", " ")
    refused = plan(",".join(["1"] * NUMBER))
    assert refused.exit_code == 1
    assert "the busiest expert's tokens over the mean" in refused.output.replace("\n", " ")


@pytest.mark.parametrize(
    "load", ["0.9", "4.1", "many", "1,2", "nan", "-1" + ",1" * 15, "1e308" + ",1e308" * 15]
)
def test_impossible_loads_are_refused(load, explain):
    result = explain("--expert-load", load)
    assert result.exit_code != 0
    assert "--expert-load" in result.output
    assert "from 1 to 4" in result.output.replace("\n", " ")


def test_check_says_who_has_which_experts_and_samples(zorse, tmp_path):
    path = tmp_path / "plan.json"
    save_plan(plan_of(inputs_of(MIXED, batch=16), SHARED), path)
    shared = SHARED.expert_parallel
    experts, samples = ("|".join(map(str, each)) for each in (shared.experts, shared.samples))
    said = " ".join(zorse("check", str(path)).output.split())
    assert f"share experts {experts}, samples {samples}" in said
