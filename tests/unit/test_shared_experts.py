"""Ranks with samples of their own that share experts: costs, simulation, and the plans found."""

import itertools
from dataclasses import replace

import pytest

from tests.unit.test_expert_costs import CHOSEN, EXPERT, HIDDEN, MODEL, NUMBER, TOKENS, WIDTH
from tests.unit.test_stock_expert_parallel import (
    MIXED,
    ONE_NODE,
    TWO_NODES,
    WIDE,
    inputs_of,
)
from zorse_megatron.costs.interface import TpShard
from zorse_megatron.flags.command import read_command
from zorse_megatron.flags.model_in_flags import computing_from_flags
from zorse_megatron.inputs.model import Experts
from zorse_megatron.plan.divided_replicas import replicas_that_share_experts
from zorse_megatron.plan.plan import (
    Chunk,
    ExpertParallel,
    Group,
    Offload,
    Plan,
    Replica,
    Schedule,
)
from zorse_megatron.planner import find_plan as find_plan_module
from zorse_megatron.planner.evaluate import Evaluator
from zorse_megatron.planner.find_plan import find_plan
from zorse_megatron.planner.search.shared_experts import with_shared_experts
from zorse_megatron.planner.simulate_plan import simulate_plan
from zorse_megatron.schedule.actions import Kind
from zorse_megatron.schedule.lower import refuse_unsupported
from zorse_megatron.simulate.action_costs import ActionCosts
from zorse_megatron.simulate.network import NetworkLoads
from zorse_megatron.simulate.rank_bytes import RankSizes

LAYERS = 4
NUMBER_WIDE = 16


def sharing(ranks, experts, samples, count, weight=1.0, **more):
    return Replica(
        ranks=tuple(ranks),
        micro_batch_size=sum(samples),
        num_microbatches=count,
        shard_weight=weight,
        expert_parallel=ExpertParallel(experts=tuple(experts), samples=tuple(samples), **more),
    )


def plan_of(inputs, *replicas):
    return Plan(
        schema_version=2,
        global_batch_size=inputs.global_batch_size,
        model=inputs.model,
        groups=(Group(replicas=replicas),),
        chunks=(Chunk(group=0, layers=(0, LAYERS)),),
        schedule=Schedule(name="1f1b"),
    )


def costs_of(inputs, plan):
    return ActionCosts(RankSizes(plan, inputs), NetworkLoads(inputs.comm))


# What ranks compute, hold and own.


@pytest.mark.parametrize("degree", [2, 4])
def test_equal_parts_cost_what_stock_computes_and_holds(degree):
    """Stock's are costed by other formulas; exchanges are apart."""
    inputs = inputs_of(batch=4 * degree)
    part = TpShard(
        shared=ExpertParallel(experts=(NUMBER // degree,) * degree, samples=(2,) * degree), index=1
    )
    found = inputs.tp_costs.of_rank(part, None)
    stock = inputs.tp_costs.of_rank(TpShard(expert_parallel=degree), None)
    for name in ("layer", "embedding", "head"):
        mine, its = getattr(found.compute, name), getattr(stock.compute, name)
        assert mine("A100-40", 2 * degree) == its("A100-40", 2), name
    again_s = found.compute.recompute_s("A100-40", 2 * degree, "full")
    assert again_s == pytest.approx(stock.compute.recompute_s("A100-40", 2, "full"), rel=1e-9)
    for mode in ("none", "selective", "full"):
        kept = found.memory.activation_bytes(2 * degree, mode)
        assert kept == stock.memory.activation_bytes(2, mode)
    assert found.memory.layer_parameters() == stock.memory.layer_parameters()
    for name in ("delayed_bytes", "boundary_bytes", "head_bytes"):
        assert getattr(found.memory, name)(2 * degree) == getattr(stock.memory, name)(2), name
    weights_s = found.compute.weight_gradients_s("A100-40", 2 * degree)
    assert weights_s == pytest.approx(stock.compute.weight_gradients_s("A100-40", 2), rel=1e-9)


def test_parts_add_up_to_the_whole():
    """Of ranks with unequal ones, also none, of samples and of experts."""
    inputs, samples, experts = inputs_of(), (120, 0, 40), (1, NUMBER - 1, 0)
    shared = ExpertParallel(experts=experts, samples=samples)
    parts = [TpShard(shared=shared, index=index) for index in range(3)]
    of_ranks = [inputs.tp_costs.of_rank(part, None) for part in parts]
    size = sum(samples)
    apart = replace(inputs.tp_costs, model=replace(MODEL, experts=None, ffn_hidden_size=0))
    dense = apart.of_rank(TpShard(), None)
    for index, each in enumerate(of_ranks):
        times = each.compute.layer_in_two("A100-40", size)
        own = samples[index]
        expected = dense.compute.layer("A100-40", own).forward_s if own else 0.0
        assert times.attention.forward_s == pytest.approx(expected, rel=1e-9)
    # Rows and weights of all experts once; what is read again for tokens that have none is not.
    rows_s = sum(each.compute.layer_in_two("A100-40", size).mlp.forward_s for each in of_ranks)
    whole_s = inputs.compute.layer("A100-40", size).forward_s
    others_s = dense.compute.layer("A100-40", size).forward_s
    # Each rank reads a router's matrix.
    assert rows_s == pytest.approx(whole_s - others_s, rel=1e-5)
    held = [each.memory.layer_parameters() for each in of_ranks]
    others = inputs.memory.layer_parameters() - NUMBER * EXPERT
    assert held == [others + number * EXPERT for number in experts]
    kept = [each.memory.activation_bytes(size, "none") for each in of_ranks]
    assert sum(kept) == pytest.approx(inputs.memory.activation_bytes(size, "none"), abs=3)
    # Of its tokens: scores in fp32 of the chosen, their numbers twice in 64 bits, where they are
    # sent in 32, and scores of all; without experts, nothing of rows.
    routing = CHOSEN * (4 + 2 * 8 + 4) + NUMBER * 2
    assert kept[2] == dense.memory.activation_bytes(40, "none") + 40 * TOKENS * routing
    # Of rows their places, thrice in 32 bits, their scores, and what the matrices have.
    row = 3 * 4 + 2 + 2 * (HIDDEN + 3 * WIDTH)
    rows = size * TOKENS * CHOSEN * (NUMBER - 1) / NUMBER
    assert kept[1] == pytest.approx(rows * row, abs=1)
    left = [each.memory.delayed_bytes(size) for each in of_ranks]
    # Inputs of the matrices of attention, and gradients of what they return.
    assert left[2] == 40 * TOKENS * 2 * (HIDDEN + HIDDEN + 3 * HIDDEN + HIDDEN)
    assert left[1] == pytest.approx(rows * 2 * (2 * HIDDEN + 3 * WIDTH), abs=1)


def test_an_owner_of_an_expert_holds_it():
    """All of the state is somebody's; experts that one rank has are its own, of others what the
    ranks that have them say."""
    inputs = inputs_of()
    pair = sharing((0, 1), (12, 4), (2, 2), 2, shard_weights=(0.0, 1.0))
    other = Replica(ranks=(2,), micro_batch_size=4, num_microbatches=2, shard_weight=3.0)
    sizes = RankSizes(plan_of(inputs, pair, other), inputs)
    experts = LAYERS * EXPERT
    dense = sizes.parameters[0] - NUMBER * experts
    owned = sizes.shards[0]
    assert sum(owned.values()) == sizes.parameters[0]
    assert owned[0] == pytest.approx(12 * experts / 4, rel=1e-3)
    assert owned[1] == pytest.approx(4 * experts / 4 + dense / 4, rel=1e-3)
    assert owned[2] == pytest.approx(NUMBER * experts * 3 / 4 + dense * 3 / 4, rel=1e-3)
    alone = RankSizes(plan_of(inputs, sharing((0, 1), (12, 4), (2, 2), 4)), inputs).shards[0]
    assert alone[0] == pytest.approx(12 * experts + dense / 2, rel=1e-3)


# Time.


@pytest.mark.parametrize("text", [ONE_NODE, TWO_NODES])
def test_tokens_cross_once_to_each_rank_with_any_of_their_experts(text):
    """Of all choices of experts, each made by one token: counted one by one."""
    inputs = inputs_of(text, batch=8)
    experts, samples = (7, 0, 8, 1), (1, 2, 1, 0)
    assert sum(experts) == NUMBER
    plan = plan_of(inputs, sharing(range(4), experts, samples, 2))
    costs = costs_of(inputs, plan)
    owner = [rank for rank, number in enumerate(experts) for _ in range(number)]
    choices = list(itertools.combinations(range(NUMBER), MODEL.experts.per_token))
    token_bytes, routes_bytes = 2 * HIDDEN, 4 * MODEL.experts.per_token
    there, told = {}, {}
    for source, target in itertools.permutations(range(4), 2):
        passing = sum(any(owner[e] == target for e in choice) for choice in choices)
        own = samples[source] * TOKENS
        if own:
            there[source, target] = own * token_bytes * passing / len(choices)
            told[source, target] = own * routes_bytes
    back = {pair[::-1]: number for pair, number in there.items()}
    there_s, back_s, told_s = (
        costs.loads.exchanges([(each, 1)]).alone_s for each in (there, back, told)
    )
    attention, experts_s, weights = zip(
        *(layer_s(costs, rank, 4) for rank in range(4)), strict=True
    )
    forward = max(each.forward_s for each in attention) + max(each.forward_s for each in experts_s)
    expected = LAYERS * (forward + there_s + back_s + 2 * told_s)
    assert took(costs, Kind.FORWARD, 4) == pytest.approx(expected, rel=1e-6)
    # Those of weights and what goes back last are beside each other; then each goes on.
    both = zip(experts_s, weights, strict=True)
    backward = max(each.backward_s - part for each, part in both) + there_s
    backward += max(
        max(part, back_s + told_s) + each.backward_s
        for each, part in zip(attention, weights, strict=True)
    )
    assert took(costs, Kind.BACKWARD, 4) == pytest.approx(LAYERS * backward, rel=1e-6)


def layer_s(costs, rank, size):
    """Attention, experts, and gradients of experts' weights."""
    compute = costs.sizes.tp_costs.of_rank(costs.sizes.part(rank), None).compute
    times = compute.layer_in_two("A100-40", size)
    return times.attention, times.mlp, compute.row_gradients_s("A100-40", size)


def took(costs, kind, size):
    """All ranks' pass through the layers of a chunk."""
    ranks = range(4)
    of_layers = [costs.seconds(rank, 0, kind, size, splits=False)[:3] for rank in ranks]
    before, between, behind = (max(each) for each in zip(*of_layers, strict=True))
    added = costs.tp_collectives(tuple(ranks), 0, size, gathers=False)
    return before + between + behind + getattr(added, f"{kind.name.lower()}_s")


def test_ranks_wait_for_the_slowest_in_attention_and_in_experts():
    inputs = inputs_of(MIXED)
    others = sharing((1, 3), (8, 8), (1, 1), 4)

    def plan(experts):
        return plan_of(inputs, sharing((0, 2), experts, (1, 1), 4), others)

    even, uneven = (costs_of(inputs, plan(experts)) for experts in ((8, 8), (14, 2)))
    before, after = (
        [each.seconds(rank, 0, Kind.FORWARD, 2, splits=False) for rank in (0, 2)]
        for each in (even, uneven)
    )
    (fast, slow), (_, less) = before, after
    assert slow[1] - (LAYERS - 1) * slow[0] > 3 * (fast[1] - (LAYERS - 1) * fast[0])
    experts_s = [each[1] - (LAYERS - 1) * each[0] for each in (slow, less)]
    assert experts_s[1] == pytest.approx(experts_s[0] / 4, rel=1e-3)
    task_s = {
        experts: simulate_plan(inputs, plan(experts)).usage[2].busy_s
        for experts in ((8, 8), (14, 2))
    }
    assert task_s[14, 2] < task_s[8, 8]


def test_of_experts_that_one_rank_has_nothing_is_summed():
    inputs = inputs_of()
    all_share = costs_of(inputs, plan_of(inputs, sharing(range(4), (4,) * 4, (1,) * 4, 4)))
    pairs = costs_of(
        inputs,
        plan_of(
            inputs,
            sharing((0, 1), (8, 8), (1, 1), 4),
            sharing((2, 3), (8, 8), (1, 1), 4),
        ),
    )
    experts = LAYERS * NUMBER * EXPERT
    for costs, summed in ((all_share, 0), (pairs, experts)):
        sizes = costs.sizes
        moved = sum(times * sum(messages.values()) for messages, times in sizes.mixed_tp[0].sums)
        # Each element goes to its owner once from each other rank that has a sum of it.
        dense = sizes.parameters[0] - experts
        assert moved == pytest.approx(3 * dense + summed, rel=1e-3)


# Plans.


def evaluated(inputs):
    return Evaluator(inputs)


def test_the_plan_found_shares_experts_as_no_other_number_of_them_would():
    """Three GPUs of three kinds: all ways to deal eight experts out, by brute force."""
    text = b"nodes:\n  - {name: a, gpus: [1 x A100-40, 1 x A10G, 1 x T4], nics: 100 Gb/s}\n"
    inputs = inputs_of(
        text, replace(MODEL, experts=Experts(num_experts=8, per_token=2, ffn_hidden_size=8192))
    )
    evaluator = evaluated(inputs)
    start = evaluator.evaluate_plan(plan_of(inputs, sharing((0, 1, 2), (3, 3, 2), (2, 1, 1), 4)))
    found = with_shared_experts(evaluator, start, [start], lambda progress: None)
    assert found is not None and found.iteration_s < 0.9 * start.iteration_s
    (replica,) = found.plan.groups[0].replicas
    times_s = {}
    for a, b in itertools.product(range(9), repeat=2):
        if a + b <= 8:
            experts = (a, b, 8 - a - b)
            shared = replace(replica.expert_parallel, experts=experts)
            other = replace(replica, expert_parallel=shared)
            plan = replace(found.plan, groups=(replace(found.plan.groups[0], replicas=(other,)),))
            each = evaluator.evaluate_plan(plan)
            if each is not None and each.fits:
                times_s[experts] = each.iteration_s
    assert len(times_s) > 20
    assert found.iteration_s <= 1.002 * min(times_s.values())


@pytest.mark.usefixtures("little_effort")
def test_plans_share_experts_where_that_is_faster(monkeypatch):
    inputs = inputs_of(ONE_NODE, WIDE)
    outcome = find_plan(inputs)
    assert any(replicas_that_share_experts(outcome.plan))
    assert outcome.simulation.iteration_s == pytest.approx(outcome.iteration_s)
    monkeypatch.setattr(find_plan_module, "with_shared_experts", lambda *given: None)
    assert find_plan(inputs).iteration_s > 1.2 * outcome.iteration_s


@pytest.mark.parametrize("offload", [None, Offload(parameters=True, gradients=True)])
def test_what_is_tried_can_be_run(offload):
    """From replicas of which some are idle, and that have in the host what cannot be packed."""
    inputs = inputs_of(MIXED, batch=8)
    replicas = [
        Replica(ranks=(rank,), micro_batch_size=2, num_microbatches=count, shard_weight=1.0)
        for rank, count in enumerate((3, 1, 0, 0))
    ]
    start = plan_of(inputs, *replicas)
    group = replace(start.groups[0], offload=offload)
    start = replace(start, groups=(group,), schedule=Schedule(name="breadth_first"))
    tried, evaluator = [], evaluated(inputs)
    simulate = evaluator.simulated
    evaluator.simulated = lambda plan: (tried.append(plan), simulate(plan))[1]
    before = evaluator.evaluate_plan(start)
    with_shared_experts(evaluator, before, [], lambda progress: None)
    assert len(tried) > 5
    for plan in tried[1:]:
        refuse_unsupported(plan)


@pytest.mark.usefixtures("little_effort")
def test_all_samples_may_be_on_some_of_the_ranks():
    """Such ranks are not halved into some that have none."""
    outcome = find_plan(inputs_of(MIXED, replace(MODEL, num_layers=1), batch=8))
    assert outcome.iteration_s > 0


def test_groups_of_a_node_become_one_that_shares_experts():
    """From a pipeline of single GPUs: no pipeline of the two nodes is faster, by brute force."""
    inputs = inputs_of(TWO_NODES, replace(WIDE, num_layers=6), batch=32)
    evaluator, seams = evaluated(inputs), (0, 2, 4, 5, 6)

    def pipeline(replicas, bounds):
        in_host = Offload(optimizer_state=True)
        groups = tuple(Group(replicas=(each,), offload=in_host) for each in replicas)
        chunks = [Chunk(group=n, layers=pair) for n, pair in enumerate(itertools.pairwise(bounds))]
        return replace(plan_of(inputs, *replicas[:1]), groups=groups, chunks=tuple(chunks))

    alone = [
        Replica(ranks=(rank,), micro_batch_size=1, num_microbatches=32, shard_weight=1.0)
        for rank in range(4)
    ]
    start = evaluator.evaluate_plan(pipeline(alone, seams))
    found = with_shared_experts(evaluator, start, [start], lambda progress: None)
    times_s = []
    for seam, *sizes in itertools.product(range(1, 6), (1, 2, 4, 8, 16), (1, 2, 4, 8, 16)):
        pairs = [
            sharing((2 * n, 2 * n + 1), (NUMBER_WIDE // 2,) * 2, (size, size), 16 // size)
            for n, size in enumerate(sizes)
        ]
        each = evaluator.evaluate_plan(pipeline(pairs, (0, seam, 6)))
        times_s += [each.iteration_s] if each.fits else []
    assert len(times_s) > 20 and found.iteration_s <= 1.002 * min(times_s) < start.iteration_s


def test_no_plan_is_found_whose_lists_have_loads_too_late():
    """Regions have samples of their own, so that one waits for what the other has not begun."""
    usual = inputs_of(ONE_NODE, batch=16)
    words = "--num-experts 4 --moe-router-load-balancing-type global_aux_loss"
    command = read_command([*words.split(), "--moe-aux-loss-coeff", "0.1"])
    assert computing_from_flags(command.args).needs_loads_in_order
    waiting = replace(usual, space=replace(usual.space, needs_loads_in_order=True))
    groups = tuple(
        Group(
            replicas=tuple(
                Replica(
                    ranks=(rank + 2 * number,),
                    micro_batch_size=1,
                    num_microbatches=8,
                    shard_weight=1.0,
                    region="ab"[rank],
                )
                for rank in range(2)
            )
        )
        for number in range(2)
    )
    chunks = tuple(Chunk(group=n, layers=(2 * n, 2 * n + 2)) for n in range(2))
    plan = replace(plan_of(usual, *groups[0].replicas), groups=groups, chunks=chunks)
    assert evaluated(usual).evaluate_plan(plan) is not None
    assert evaluated(waiting).evaluate_plan(plan) is None
