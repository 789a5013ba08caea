"""Ranks that share experts, and run micro-batches as two halves: times, memory, and plans found."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.test_expert_costs import HIDDEN, MODEL, NUMBER, TOKENS
from tests.unit.test_shared_experts import costs_of, evaluated, plan_of, sharing
from tests.unit.test_stock_expert_parallel import MIXED, ONE_NODE, TWO_NODES, WIDE, inputs_of
from zorse_megatron.costs.expert_passes import (
    Exchanges,
    LayerParts,
    backward_pass,
    forward_pass,
)
from zorse_megatron.costs.interface import TpShard
from zorse_megatron.costs.shared_experts import ExpertLoad, TokenMessages
from zorse_megatron.flags.command import read_command
from zorse_megatron.flags.model_in_flags import computing_from_flags
from zorse_megatron.inputs.model import Computing, JobRecompute
from zorse_megatron.plan.plan import Chunk, Group, Recompute
from zorse_megatron.planner.inputs.search_inputs import with_load
from zorse_megatron.planner.outcome import describe_plan
from zorse_megatron.planner.search.shared_experts import with_shared_experts
from zorse_megatron.planner.simulate_plan import simulate_plan
from zorse_megatron.schedule.actions import Kind
from zorse_megatron.schedule.lower import refuse_unsupported
from zorse_megatron.simulate.assumptions import Perturbation
from zorse_megatron.simulate.iteration import micro_batch_times
from zorse_megatron.simulate.memory_ledger import Category

KIND, LARGE = "A100-40", replace(WIDE, num_layers=4)

# Against streams that run what the runtime launches, event by event.


def forward_launches(
    layers, times, halves, *, there, back, told, last=False, again="", dense=frozenset()
):
    """As one rank launches it: what it computes, what it sends, what it waits for.

    `last`: a single layer; of a layer that is recomputed messages have names of their own.
    """
    attention, experts = times
    for layer in [layers - 1] if last else range(layers):
        for half in halves:
            if layer and not last and layer - 1 not in dense:
                yield "wait", (half, "back", layer - 1)
            yield "compute", attention
            if layer in dense:
                continue
            yield "send", (half, again + "told", layer), told
            yield "wait", (half, again + "told", layer)
            yield "send", (half, again + "there", layer), there + told
        for half in halves if layer not in dense else ():
            yield "wait", (half, again + "there", layer)
            yield "compute", experts
            yield "send", (half, again + "back", layer), back
    for half in halves if layers - 1 not in dense else ():
        yield "wait", (half, again + "back", layers - 1)


def backward_launches(
    layers, times, halves, *, recomputed=0, again=(), dense=frozenset(), **messages
):
    attention, experts, weights = times
    there, back, told = (messages[name] for name in ("there", "back", "told"))
    for layer in range(layers - 1, -1, -1):
        if layer < recomputed:
            yield from forward_launches(
                layer + 1, again, halves, **messages, last=True, again="again ", dense=dense
            )
        if layer not in dense and (layer < recomputed or layer == layers - 1):
            for half in reversed(halves):
                yield "send", (half, "there", layer), there
        for half in reversed(halves) if layer not in dense else ():
            yield "wait", (half, "there", layer)
            yield "compute", experts
            yield "send", (half, "back", layer), back + told
            yield "compute", weights
        for half in reversed(halves):
            if layer not in dense:
                yield "wait", (half, "back", layer)
            yield "compute", attention
            if layer > recomputed and layer - 1 not in dense:
                yield "send", (half, "there", layer - 1), there


def ends_of(programs, starts):
    """When each rank is done; a message leaves when it is first in line and all have it there."""
    steps, clocks = [list(each) for each in programs], list(starts)
    at, line = [0] * len(steps), [step[1:] for step in steps[0] if step[0] == "send"]
    come, done, free = {}, {}, 0.0
    while any(at[rank] < len(steps[rank]) for rank in range(len(steps))):
        for rank, mine in enumerate(steps):
            while at[rank] < len(mine):
                what, which, *_ = mine[at[rank]]
                if what == "wait" and which not in done:
                    break
                if what == "compute":
                    clocks[rank] += which
                elif what == "send":
                    come.setdefault(which, []).append(clocks[rank])
                else:
                    clocks[rank] = max(clocks[rank], done[which])
                at[rank] += 1
        while line and len(come.get(line[0][0], ())) == len(steps):
            which, seconds = line.pop(0)
            free = done[which] = max(free, *come[which]) + seconds
    return clocks


SECONDS = st.just(0.0) | st.floats(0.001, 10)


MESSAGES = st.fixed_dictionaries(dict.fromkeys(("there", "back", "told"), SECONDS))


def of_ranks(count):
    return st.integers(1, 5).flatmap(
        lambda ranks: st.tuples(
            *[st.lists(SECONDS, min_size=ranks, max_size=ranks) for _ in range(count)]
        )
    )


def taking(there, back, told):
    return Exchanges(there_s=there, back_s=back, told_s=told)


HALVES = st.sampled_from(["A", "AB"])


def parts_of_layers(times, layers, dense):
    names = ("attention_s", "experts_s", "weights_s")
    once = dict(zip(names, times, strict=False))
    alone = once | {"experts_s": None}
    return [LayerParts(**(alone if layer in dense else once)) for layer in range(layers)]


def forward_of(attention, experts, sent, layers, halves="AB", *, dense=()):
    of_layers = parts_of_layers((attention, experts), layers, dense)
    return forward_pass(of_layers, sent, parts=len(halves))


def backward_of(times, sent, layers, halves="AB", *, again=None, recomputed=0, dense=()):
    of_layers = parts_of_layers(times, layers, dense)
    forward = parts_of_layers(again or times[:2], recomputed, dense)
    return backward_pass(of_layers, sent, parts=len(halves), again=forward)


def number_and_dense(most):
    """How many layers, of which one or more have experts."""
    return st.integers(1, most).flatmap(
        lambda layers: st.tuples(
            st.just(layers),
            st.frozensets(st.integers(0, layers - 1)).filter(lambda dense: len(dense) < layers),
        )
    )


@given(of_ranks(3), MESSAGES, number_and_dense(6), HALVES)
def test_a_forward_ends_when_its_streams_do(times, messages, of_layers, halves):
    """Also where ranks come to it one after the other."""
    starts, attention, experts = times
    layers, dense = of_layers
    programs = [
        forward_launches(layers, each, halves, **messages, dense=dense)
        for each in zip(attention, experts, strict=True)
    ]
    found = forward_of(attention, experts, taking(**messages), layers, halves, dense=dense)
    together = max(map(sum, zip(starts, found.before_s, strict=True))) + found.between_s
    expected = ends_of(programs, starts)
    assert [together + own for own in found.behind_s] == pytest.approx(expected, rel=1e-9, abs=1e-9)
    computed = zip(attention, experts, strict=True)
    exchanging = layers - len(dense)
    _computes_everything(found, [len(halves) * (layers * a + exchanging * e) for a, e in computed])


# With whole layers computed again a micro-batch has no halves.
@pytest.mark.parametrize("ends_dense", [False, True])
@given(of_ranks(6), MESSAGES, number_and_dense(6), st.data())
def test_a_backward_ends_when_its_streams_do(ends_dense, times, messages, of_layers, data):
    """Each rank with its own attention of the first layer."""
    starts, *once = times[:4]
    layers, dense = of_layers
    if ends_dense:
        layers, dense = layers + 1, dense | {layers}
    again, recomputed = times[4:], data.draw(st.integers(0, layers))
    halves = data.draw(HALVES)
    more = {"recomputed": recomputed, "dense": dense}
    programs = [
        backward_launches(layers, own, halves, again=forward, **more, **messages)
        for own, forward in zip(zip(*once, strict=True), zip(*again, strict=True), strict=True)
    ]
    found = backward_of(once, taking(**messages), layers, halves, again=again, **more)

    def ends(starts):
        if found.apart_s is None:
            together = max(map(sum, zip(starts, found.before_s, strict=True))) + found.between_s
            return [together + own for own in found.behind_s]
        of_ranks_s = zip(*found.apart_s, strict=True)
        return [max(map(sum, zip(starts, takes_s, strict=True))) for takes_s in of_ranks_s]

    assert (found.apart_s is not None) == (halves == "AB" and layers - 1 in dense)
    expected = ends_of(programs, starts)
    assert ends(starts) == pytest.approx(expected, rel=1e-9, abs=1e-9)
    at_once = found.between_s + max(found.before_s)
    assert ends([0.0] * len(starts)) == pytest.approx([at_once + own for own in found.behind_s])
    computed = zip(*once, *again, strict=True)
    exchanging, exchanging_again = (len({*range(n)} - dense) for n in (layers, recomputed))
    _computes_everything(
        found,
        [
            len(halves)
            * (layers * a + exchanging * (e + w) + recomputed * f + exchanging_again * g)
            for a, e, w, f, g in computed
        ],
    )


def _computes_everything(found, of_ranks_s):
    for index, seconds in enumerate(of_ranks_s):
        assert sum(found.of_rank(index)) == pytest.approx(seconds, abs=1e-9)
    assert found.exposed_s >= -1e-9


@given(of_ranks(3), st.integers(1, 6))
def test_with_free_exchanges_the_slowest_rank_computes_all_the_time(times, layers):
    attention, experts, weights = ([*each, max(each)] for each in times)
    free = taking(0.0, 0.0, 0.0)
    forward = forward_of(attention, experts, free, layers)
    backward = backward_of((attention, experts, weights), free, layers)
    computed = 2 * layers * (attention[-1] + experts[-1])
    assert forward.before_s[-1] + forward.between_s == pytest.approx(computed, abs=1e-9)
    computed += 2 * layers * weights[-1]
    assert backward.between_s + backward.behind_s[-1] == pytest.approx(computed, abs=1e-9)


@given(MESSAGES, st.integers(1, 4), st.integers(1, 6))
def test_with_free_computation_exchanges_follow_each_other(messages, number, layers):
    sent, none = taking(**messages), [0.0] * number
    total = 2 * layers * sum(messages.values())
    forward = forward_of(none, none, sent, layers)
    backward = backward_of((none, none, none), sent, layers)
    assert forward.exposed_s == pytest.approx(total + 2 * layers * messages["told"])
    assert backward.exposed_s == pytest.approx(total)


# Plans.


def overlapping(*given, **more):
    return sharing(*given, overlap=True, **more)


def half_s(inputs, replica, index=0):
    """Attention, experts, and gradients of experts' weights of half a micro-batch."""
    part = TpShard.of(replica, replica.ranks[index])
    compute = inputs.of_experts.tp_costs.of_rank(part, None).compute
    size = replica.micro_batch_size // 2
    times = compute.layer_in_two(KIND, size)
    return times.attention, times.mlp, compute.row_gradients_s(KIND, size)


def sent_s(inputs, plan, replica):
    """Tokens there, back, and what is told, of half a micro-batch."""
    costs = costs_of(inputs, plan)
    messages = TokenMessages.of(
        replica,
        replica.micro_batch_size // 2,
        tp_costs=inputs.tp_costs,
        boundary_bytes=lambda samples: samples * TOKENS * 2 * HIDDEN,
        sequence_length=TOKENS,
    )
    back = {pair[::-1]: number for pair, number in messages.there.items()}
    found = (messages.there, back, messages.told)
    return [costs.loads.exchanges([(each, 1)]).alone_s for each in found]


@pytest.mark.parametrize("busiest", [1.0, 2.0])
@pytest.mark.parametrize("text", [ONE_NODE, TWO_NODES])
def test_a_layer_by_hand(text, busiest):
    """A model of one layer, on four equal ranks; routing is even, or any may have the busiest."""
    inputs = inputs_of(text, replace(MODEL, num_layers=1), batch=16)
    inputs = with_load(inputs, ExpertLoad.falling(busiest, NUMBER))
    replica = overlapping(range(4), (4,) * 4, (2,) * 4, 2)
    plan = replace(plan_of(inputs, replica), chunks=(Chunk(group=0, layers=(0, 1)),))
    attention, experts, weights = half_s(inputs, replica)
    there, back, told = sent_s(inputs, plan, replica)
    ends = [
        (each.forward_s, each.backward_s)
        for each in (inputs.compute.embedding(KIND, 2), inputs.compute.head(KIND, 2))
    ]
    a, e = attention.forward_s, experts.forward_s
    b_routed = told + max(there + told, a) + told  # from the end of A's attention
    b_there = b_routed + there + told
    a_back = max(b_there, b_routed + e) + back
    forward = a + max(a_back, max(b_there, b_routed + e) + e) + back
    forward += ends[0][0] + ends[1][0]
    a, w = attention.backward_s, weights
    e = experts.backward_s - w
    b_back = max(2 * there, there + e) + back + told
    a_experts = max(2 * there, there + e + w) + e
    a_back = max(b_back, a_experts) + back + told
    backward = max(max(a_experts + w, b_back) + a, a_back) + a
    backward += ends[0][1] + ends[1][1]
    took = {s.action: s.end_s - s.start_s for s in simulate_plan(inputs, plan).spans(1)}
    for name, expected in (("0F0", forward), ("0F1", forward), ("0B0", backward)):
        assert took[name] == pytest.approx(expected, rel=1e-9), name
    assert micro_batch_times(plan, inputs) == pytest.approx([forward + backward] * 4, rel=1e-9)


@pytest.mark.parametrize("mode", ["none", "selective"])
def test_weight_gradients_that_are_apart_take_their_part(mode):
    """Then nothing of the experts' computation is behind the exchange that follows it."""
    inputs = inputs_of(TWO_NODES, batch=16)
    replica = overlapping(range(4), (7, 4, 4, 1), (2, 4, 2, 0), 2)
    usual = plan_of(inputs, replica)
    group = replace(usual.groups[0], recompute=Recompute(mode=mode))
    found = []
    for splits in (False, True):
        plan = replace(usual, groups=(replace(group, split_backward=splits),))
        costs = costs_of(inputs, plan)
        kinds = (Kind.BACKWARD, Kind.WEIGHT_GRADIENT) if splits else (Kind.BACKWARD,)
        found.append(
            [
                sum(sum(costs.seconds(rank, 0, kind, 8, splits=splits)) for kind in kinds)
                for rank in range(4)
            ]
        )
    assert found[0] == pytest.approx(found[1], rel=1e-9)
    own = inputs.tp_costs.of_rank(TpShard.of(replica, 1), None).compute
    again_s = 0.0 if mode == "none" else own.recompute_s(KIND, 4, mode)
    layers = own.layer(KIND, 4).backward_s + again_s
    embedding, head = (getattr(own, name)(KIND, 8).backward_s for name in ("embedding", "head"))
    assert found[0][1] == pytest.approx(8 * layers + embedding + head, rel=1e-9)
    (apart_s,) = costs.seconds(1, 0, Kind.WEIGHT_GRADIENT, 8, splits=True)
    assert apart_s == pytest.approx(8 * own.weight_gradients_s(KIND, 4), rel=1e-9)


def test_dense_layers_among_others_exchange_nothing():
    """Chunks with none but such, and chunks with both."""
    inputs = inputs_of(TWO_NODES, replace(MODEL, dense_layers=(0, 1, 3)), batch=16)
    replica = overlapping(range(4), (4,) * 4, (2,) * 4, 2)
    chunks = tuple(Chunk(group=0, layers=layers) for layers in ((0, 2), (2, 4)))
    costs = costs_of(inputs, replace(plan_of(inputs, replica), chunks=chunks))
    dense = inputs.layer_kinds.without.tp_costs.of_rank(TpShard.of(replica, 0), None).compute
    dense_s = dense.layer(KIND, 4)
    embedding_s = dense.embedding(KIND, 8)
    assert costs.tp_collectives(replica.ranks, 0, 8, gathers=False).both_s == 0
    assert sum(costs.seconds(0, 0, Kind.FORWARD, 8, splits=False)) == pytest.approx(
        4 * dense_s.forward_s + embedding_s.forward_s, rel=1e-9
    )
    attention, experts, weights = half_s(inputs, replica)
    there, back, told = sent_s(inputs, costs.sizes.plan, replica)
    # Forward, from where A's tokens may leave; the dense layer of A is computed while B's return.
    a, e, d = attention.forward_s, experts.forward_s, dense_s.forward_s
    b_routed = told + max(there + told, a) + told
    a_computed = max(b_routed + there + told, b_routed + e)
    a_back, b_computed = a_computed + back, a_computed + e
    b_back = max(a_back, b_computed) + back
    forward = a + max(max(b_computed, a_back) + d, b_back) + d
    # Backward, where gradients of B leave when those of its dense layer are there.
    a, e, w, d = attention.backward_s, experts.backward_s - weights, weights, dense_s.backward_s
    b_there = d + there
    a_there = max(2 * d, b_there) + there
    b_computed = max(2 * d, b_there) + e
    b_back = max(b_computed, a_there) + back + told
    a_computed = max(b_computed + w, a_there) + e
    a_back = max(a_computed, b_back) + back + told
    backward = max(max(a_computed + w, b_back) + a, a_back) + a
    found = costs.tp_collectives(replica.ranks, 1, 8, gathers=False)
    for kind, head, expected in (
        (Kind.FORWARD, dense.head(KIND, 8).forward_s, forward),
        (Kind.BACKWARD, dense.head(KIND, 8).backward_s, backward),
    ):
        exposed_s = found.forward_s if kind is Kind.FORWARD else found.backward_s
        took_s = sum(costs.seconds(0, 1, kind, 8, splits=False)) + exposed_s - head
        assert took_s == pytest.approx(expected, rel=1e-9)


def test_a_rank_that_all_others_wait_for_computes_all_the_time():
    """In dense layers behind those with experts, too, for which the others have no samples."""
    inputs = inputs_of(TWO_NODES, replace(MODEL, dense_layers=(1, 2, 3)), batch=16)
    plan = plan_of(inputs, overlapping(range(4), (4,) * 4, (8, 0, 0, 0), 2))
    busy, *others = simulate_plan(inputs, plan).usage
    assert busy.wait_s == pytest.approx(0.0, abs=1e-9)
    assert all(each.wait_s > 0.5 * busy.busy_s for each in others)


def test_the_critical_path_is_of_ranks_that_compute():
    """Where dense layers are first and last, and one rank has more samples for them."""
    inputs = inputs_of(TWO_NODES, replace(MODEL, dense_layers=(0, 3)), batch=12)
    plan = plan_of(inputs, overlapping(range(4), (4,) * 4, (2, 2, 6, 2), 1))
    found = simulate_plan(inputs, plan)
    steps = [step for step in found.critical_path if step.action == "0B0"]
    assert len(steps) > 1
    for step in steps:
        (span,) = (each for each in found.spans(step.rank) if each.action == "0B0")
        assert span.start_s - 1e-9 <= step.start_s and step.end_s <= span.end_s + 1e-9


@pytest.mark.parametrize("dense", [(0, 1, 2), (1, 2, 3)])
def test_slow_ranks_exchange_as_fast(dense):
    """Wherever the dense layers are; what exchanges add is that of the usual pace."""
    inputs = inputs_of(TWO_NODES, replace(MODEL, dense_layers=dense), batch=16)
    replica = overlapping(range(4), (4,) * 4, (2,) * 4, 2)
    plan = plan_of(inputs, replica)
    took = []
    for factor in (1.0, 2.0):
        perturbation = Perturbation(rank_factors=dict.fromkeys(range(4), factor))
        spans = simulate_plan(inputs, plan, perturbation=perturbation).spans(1)
        took += [span.end_s - span.start_s for span in spans if span.action == "0B0"]
    exchanges = costs_of(inputs, plan).tp_collectives(replica.ranks, 0, 8, gathers=False)
    assert exchanges.backward_s > 0.01 * took[0]
    assert took[1] == pytest.approx(2 * took[0] - exchanges.backward_s, rel=1e-9)


@pytest.mark.parametrize("dense", [(), (3,), (0, 3)])
def test_a_slow_rank_that_computes_nothing_slows_nobody(dense):
    inputs = inputs_of(TWO_NODES, replace(MODEL, dense_layers=dense), batch=16)
    plan = plan_of(inputs, overlapping(range(4), (8, 0, 4, 4), (2, 0, 4, 2), 2))
    slow = Perturbation(rank_factors={1: 5.0})
    usual, found = (
        [span.end_s - span.start_s for span in simulated.spans(2) if span.action == "0B0"]
        for simulated in (
            simulate_plan(inputs, plan),
            simulate_plan(inputs, plan, perturbation=slow),
        )
    )
    assert found == pytest.approx(usual, rel=1e-9)


def test_halves_take_the_place_of_what_arrives():
    """Of each micro-batch in flight; the ledger of the runtime says so, too."""
    inputs = inputs_of(batch=16)

    def activations(make):
        replicas = [make((2 * n, 2 * n + 1), (8, 8), (2, 2), 4) for n in range(2)]
        groups = tuple(Group(replicas=(each,)) for each in replicas)
        chunks = tuple(Chunk(group=n, layers=(2 * n, 2 * n + 2)) for n in range(2))
        plan = replace(plan_of(inputs, *replicas[:1]), groups=groups, chunks=chunks)
        memory = simulate_plan(inputs, plan).memory
        return [each.by_category_bytes[Category.ACTIVATIONS] for each in memory]

    assert activations(overlapping) == activations(sharing)


def tried_from(inputs, start):
    """What a climb finds, and all that it simulates."""
    evaluator, tried = evaluated(inputs), []
    simulate = evaluator.simulated
    evaluator.simulated = lambda plan: (tried.append(plan), simulate(plan))[1]
    before = evaluator.evaluate_plan(start)
    return before, with_shared_experts(evaluator, before, [before], lambda progress: None), tried


def halves(plan):
    """Replicas that run them, with their groups."""
    return [
        (group, each)
        for group in plan.groups
        for each in group.replicas
        if each.expert_parallel is not None and each.expert_parallel.overlap
    ]


def test_exchanges_overlap_where_that_is_faster():
    """Over slow links, with all that is simulated without it."""
    slow = inputs_of(TWO_NODES, LARGE, batch=32)
    start = plan_of(slow, sharing(range(4), (4,) * 4, (2,) * 4, 4))
    before, found, tried = tried_from(slow, start)
    assert halves(found.plan) and found.iteration_s < before.iteration_s
    assert "that share experts, overlapped" in describe_plan(found.plan, slow.kinds)
    apart = [plan for plan in tried if not halves(plan)]
    evaluator = evaluated(slow)
    best = min(each.iteration_s for each in map(evaluator.evaluate_plan, apart) if each.fits)
    assert found.iteration_s < best
    for plan in tried:
        refuse_unsupported(plan)


def test_nothing_overlaps_where_each_weight_is_read_twice_for_little():
    fast = inputs_of(ONE_NODE.replace(b"200 GB/s", b"20000 GB/s"), LARGE, batch=32)
    start = plan_of(fast, overlapping(range(4), (4,) * 4, (2,) * 4, 4))
    before, found, _ = tried_from(fast, start)
    assert not halves(found.plan) and found.iteration_s < before.iteration_s


@pytest.mark.parametrize("text", [ONE_NODE, MIXED])
def test_halves_that_are_tried_can_be_run(text):
    """Whole blocks of samples in each, and nothing that is recomputed in whole."""
    usual = inputs_of(text, LARGE, batch=32)
    inputs = replace(usual, space=replace(usual.space, sample_block=2))
    _, _, tried = tried_from(inputs, plan_of(inputs, sharing(range(4), (4,) * 4, (2,) * 4, 4)))
    found = [each for plan in tried for each in halves(plan)]
    assert found and Recompute(mode="full") in [plan.groups[0].recompute for plan in tried]
    for group, replica in found:
        assert not any(count % 4 for count in replica.expert_parallel.samples)
        recompute = replica.recompute or group.recompute
        assert recompute is None or recompute.mode != "full"


def test_packed_samples_are_read_off_the_command():
    for flags, expected in (["--sft"], True), ([], False):
        assert computing_from_flags(read_command(flags).args).are_packed is expected


@pytest.mark.parametrize(
    "computing",
    [
        Computing(attention="flash", needs_loads_in_order=True),
        Computing(attention="flash", are_packed=True),
        Computing(attention="flash", recompute=JobRecompute(mode="full", num_layers=4)),
    ],
)
def test_none_is_tried_where_micro_batches_stay_whole(computing):
    inputs = inputs_of(TWO_NODES, LARGE, batch=32, computing=computing)
    _, _, tried = tried_from(inputs, plan_of(inputs, sharing(range(4), (4,) * 4, (2,) * 4, 4)))
    assert tried and not any(map(halves, tried))
