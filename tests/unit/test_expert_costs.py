"""What experts cost: times with an intercept, memory, and plans; against sums by hand."""

import json
import shlex
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.cli_samples import runner_in
from tests.unit.made_plans import plan_of, replica
from tests.unit.profile_samples import good as good_profile
from zorse_megatron.cli.workload import Workload
from zorse_megatron.cli.workload_costs import workload_problems
from zorse_megatron.costs.analytic_compute import (
    AnalyticCompute,
    elementwise_bytes,
    selective_share,
    shares_of,
    traffic_of,
)
from zorse_megatron.costs.interface import TpShard
from zorse_megatron.costs.model_memory import (
    LayerActivations,
    TransformerMemory,
    delayed_elements,
    precision_of,
)
from zorse_megatron.costs.profiled_compute import ProfiledCompute
from zorse_megatron.flags.command import read_command
from zorse_megatron.flags.model_in_flags import computing_from_flags
from zorse_megatron.gpus.known_gpus import GPU_KINDS
from zorse_megatron.inputs.cluster_yaml import parse_cluster
from zorse_megatron.inputs.lora import misfits, parse_lora
from zorse_megatron.inputs.model import USUAL, Computing, Experts, ExpertsOfRank, ModelShape
from zorse_megatron.inputs.profile import Profile, Source, parse_profile
from zorse_megatron.plan.plan import ExpertParallel, TpShards
from zorse_megatron.plan.plan_file import dump_plan
from zorse_megatron.planner.find_plan import find_plan
from zorse_megatron.planner.inputs.cost_models import CostModels
from zorse_megatron.planner.inputs.search_inputs import SearchSpace, make_inputs
from zorse_megatron.planner.outcome import PlannerInputError
from zorse_megatron.planner.search.effort import EVERY_PARTITION_UP_TO
from zorse_megatron.planner.search.tensor_parallel_choices import dealt, tp_shards_to_try
from zorse_megatron.simulate.iteration import simulate
from zorse_megatron.simulate.rank_bytes import RankSizes

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
KIND, TOKENS, HIDDEN, WIDTH, NUMBER, CHOSEN = "A100-40", 512, 1024, 768, 16, 4
EXPERTS = Experts(num_experts=NUMBER, per_token=CHOSEN, ffn_hidden_size=WIDTH)
DENSE = ModelShape(
    name="small",
    num_layers=4,
    hidden_size=HIDDEN,
    ffn_hidden_size=4 * HIDDEN,
    num_attention_heads=16,
    num_query_groups=16,
    kv_channels=64,
    vocab_size=32000,
    seq_length=TOKENS,
    activation="swiglu",
    norm="rmsnorm",
    linear_bias=False,
)
MODEL = replace(DENSE, experts=EXPERTS)
SHARED = replace(MODEL, experts=replace(EXPERTS, shared_ffn_hidden_size=WIDTH))
EXPERT = 3 * HIDDEN * WIDTH
ATTENTION = 4 * HIDDEN * HIDDEN


def cluster(nodes=1):
    node = b"{name: a, count: %d, gpus: [2 x A100-40, 2 x T4], nics: 100 Gb/s}" % nodes
    return parse_cluster(b"nodes: [%s]" % node)


# Times.


def seconds_by_hand(size, *, gradient_bytes=4, beside=0.0):
    """Forward, backward and weight gradients of a micro-batch on the GPU above."""
    gpu, shares = GPU_KINDS[KIND], shares_of([KIND], "bfloat16")[0]
    peak, bandwidth = gpu.peak.of("bfloat16"), gpu.memory_bytes_per_s
    tokens, held = size * TOKENS, NUMBER * EXPERT
    matrices = 2 * tokens * (ATTENTION + NUMBER * HIDDEN + CHOSEN * EXPERT)
    flops = matrices + 4 * size * TOKENS**2 / 2 * HIDDEN
    there, back = traffic_of("bfloat16")
    moved = size * elementwise_bytes(MODEL, 2)
    others = ATTENTION + NUMBER * HIDDEN + 2 * HIDDEN
    rows = tokens * (6 * CHOSEN * HIDDEN * 2 + 64 * NUMBER)
    forward = there.elementwise_passes * moved + there.bytes_per_parameter * others
    backward = back.elementwise_passes * moved + back.bytes_per_parameter * others
    both_s = (2 * held + rows) / bandwidth
    added_s = 2 * gradient_bytes * held / bandwidth
    return (
        flops / (peak * shares.forward) + forward / bandwidth + both_s,
        2 * flops / (peak * shares.backward) + backward / bandwidth + both_s + added_s,
        matrices / (peak * shares.backward) + added_s,
    )


@pytest.mark.parametrize(("narrow", "gradient_bytes"), [(False, 4), (True, 2)])
def test_every_micro_batch_reads_all_experts_and_adds_to_all_gradients(narrow, gradient_bytes):
    computing = replace(USUAL, narrow_gradients=narrow)
    costs = AnalyticCompute(MODEL, dtype="bfloat16", computing=computing)
    for size in (8, 32):
        forward_s, backward_s, weights_s = seconds_by_hand(size, gradient_bytes=gradient_bytes)
        times = costs.layer(KIND, size)
        assert times.forward_s == pytest.approx(forward_s)
        assert times.backward_s == pytest.approx(backward_s)
        assert costs.weight_gradients_s(KIND, size) == pytest.approx(weights_s)
        assert weights_s < backward_s


def test_time_over_micro_batch_size_has_an_intercept_of_12_bytes_for_each_parameter():
    costs = AnalyticCompute(MODEL, dtype="bfloat16")
    dense = AnalyticCompute(DENSE, dtype="bfloat16")

    def intercept_s(cost):
        small, large = (sum(vars(cost.layer(KIND, size)).values()) for size in (8, 16))
        return 2 * small - large

    bandwidth = GPU_KINDS[KIND].memory_bytes_per_s
    others = MODEL.layer_parameters() - NUMBER * EXPERT
    both = sum(each.bytes_per_parameter for each in traffic_of("bfloat16"))
    expected = (12 * NUMBER * EXPERT + both * others) / bandwidth
    assert intercept_s(costs) == pytest.approx(expected)
    assert intercept_s(dense) == pytest.approx(both * DENSE.layer_parameters() / bandwidth)


def test_small_micro_batches_wait_for_their_launches():
    tiny = replace(MODEL, seq_length=8, experts=replace(EXPERTS, ffn_hidden_size=8))
    for kind, dtype, number in ((KIND, "bfloat16", 1), ("V100-16", "float16", NUMBER)):
        times = AnalyticCompute(tiny, dtype=dtype).layer(kind, 1)
        assert times.forward_s == pytest.approx(100e-6 + number * 15e-6)
        assert times.backward_s == pytest.approx(200e-6 + number * 35e-6)


def test_recomputing_an_mlp_is_for_dense_layers():
    """Megatron's `mlp` of `--recompute-modules` leaves layers with experts alone."""
    computing = Computing(attention="flash", modules=("core_attn", "mlp"))
    alone = Computing(attention="flash")
    assert selective_share(MODEL, computing) == selective_share(MODEL, alone)
    assert selective_share(DENSE, computing) > selective_share(DENSE, alone)
    form = LayerActivations(
        model=MODEL, element_bytes=2, computing=Computing(modules=("core_attn", "mlp"))
    )
    kept = LayerActivations(model=MODEL, element_bytes=2).bytes_per_sample("selective")
    assert form.bytes_per_sample("selective") == kept


def test_nobody_has_measured_such_layers():
    costs, dense = (AnalyticCompute(each, dtype="bfloat16") for each in (MODEL, DENSE))
    assert costs.provenance(KIND).off_by > dense.provenance(KIND).off_by
    assert "without experts" in costs.provenance(KIND).detail


def profile_with(**model):
    told = good_profile()
    told["models"][0] |= model
    return parse_profile(json.dumps(told).encode())


def test_times_of_other_layers_are_not_used():
    measured = profile_with()
    known = measured.times[0]
    dense = measured.model_named(known.model)
    model = replace(dense, experts=EXPERTS, seq_length=known.seq_length)
    costs = ProfiledCompute(measured, model, dtype=known.dtype)
    assert costs.layer(KIND, 1) == AnalyticCompute(model, dtype=known.dtype).layer(KIND, 1)
    of_experts = {"num_experts": NUMBER, "per_token": CHOSEN, "ffn_hidden_size": WIDTH}
    other = ProfiledCompute(profile_with(experts=of_experts), model, dtype=known.dtype)
    assert other.provenance(known.gpu_kind).basis != "analytic"


# Memory. What a layer keeps is compared with autograd in tests/megatron/test_measure_layers.py.


@pytest.mark.parametrize("router_bytes", [0, 4])
def test_kept_rows_by_hand(router_bytes):
    experts = replace(EXPERTS, shared_ffn_hidden_size=96, has_shared_gate=True, scores_all=True)
    form = LayerActivations(
        model=replace(DENSE, experts=experts),
        element_bytes=2,
        computing=Computing(has_auxiliary_loss=True, router_bytes=router_bytes),
    )
    attention = 2 * (3 * HIDDEN + 3 * HIDDEN) + 4 * 16
    rows = 2 * CHOSEN * (HIDDEN + 3 * WIDTH)
    routing = 2 * NUMBER * 4 + 4 * CHOSEN * 8 + (CHOSEN + NUMBER) * (router_bytes or 2)
    shared = 2 * (3 * 96 + HIDDEN + 1)
    by_hand = attention + 2 * 2 * HIDDEN + rows + routing + shared
    assert form.bytes_per_sample("none") == TOKENS * by_hand


def test_delayed_weight_gradients_by_hand():
    """Inputs and gradients of outputs: of attention, and of each expert that a token passes."""
    attention = (HIDDEN + HIDDEN) + (3 * HIDDEN + HIDDEN)
    experts = CHOSEN * (HIDDEN + WIDTH + 2 * WIDTH + HIDDEN)
    assert delayed_elements(MODEL) == TOKENS * (attention + experts)


def test_state_is_that_of_all_experts():
    memory = TransformerMemory(model=MODEL, dtype="bfloat16", precision=precision_of("bfloat16"))
    count = memory.layer_parameters()
    assert count == ATTENTION + NUMBER * HIDDEN + NUMBER * EXPERT + 2 * HIDDEN
    each = (memory.parameter_bytes, memory.gradient_bytes, memory.state_bytes)
    assert sum(kind(count) for kind in each) == 18 * count


# Flags.


@pytest.mark.parametrize(
    ("words", "block", "has_loss"),
    [
        ("--num-experts 8", 1, False),
        ("--num-experts 8 --moe-aux-loss-coeff 0.01", 4, True),
        (
            "--num-experts 8 --moe-router-load-balancing-type seq_aux_loss aux_loss "
            "--moe-aux-loss-coeff 0.01 0.0",
            1,
            True,
        ),
        (
            "--num-experts 8 --moe-router-load-balancing-type seq_aux_loss aux_loss "
            "--moe-aux-loss-coeff 0.01 0.01",
            4,
            True,
        ),
        (
            "--num-experts 8 --moe-router-load-balancing-type none --moe-aux-loss-coeff 0.1",
            1,
            False,
        ),
        ("--moe-aux-loss-coeff 0.01", 1, False),
    ],
)
def test_what_a_loss_is_balanced_over(words, block, has_loss):
    args = read_command(["--micro-batch-size", "4", *shlex.split(words)]).args
    computing = computing_from_flags(args)
    assert (computing.sample_block, computing.has_auxiliary_loss) == (block, has_loss)


# Plans.


def inputs_of(model=MODEL, *, batch=24, profile=None, space=None, nodes=1, **computing):
    return make_inputs(
        cluster(nodes),
        model,
        profile,
        global_batch_size=batch,
        dtype="float16",
        space=space,
        computing=Computing(attention="flash", **computing),
    )


@pytest.mark.usefixtures("little_effort")
def test_a_plan_names_the_experts():
    inputs = inputs_of()
    outcome = find_plan(inputs, stock=())
    model = outcome.plan.model
    assert (model.num_experts, model.moe_router_topk) == (NUMBER, CHOSEN)
    assert model.moe_ffn_hidden_size == WIDTH
    assert simulate(outcome.plan, inputs).iteration_s == pytest.approx(outcome.iteration_s)
    # Nothing is said of them where there are none.
    dense = find_plan(inputs_of(DENSE), stock=()).plan
    assert "moe" not in dump_plan(dense) and "experts" not in dump_plan(dense)


def sizes_of(plan):
    replicas = [each for group in plan.groups for each in group.replicas]
    return {each.micro_batch_size for each in replicas if each.num_microbatches}


@pytest.mark.parametrize("strategy", ["zorse", "stock", "zorse-paper", "cephalo"])
def test_micro_batches_are_multiples_of_the_block(strategy):
    plan = find_plan(inputs_of(sample_block=3, has_auxiliary_loss=True), strategy=strategy).plan
    sizes = sizes_of(plan)
    assert sizes and not any(size % 3 for size in sizes)


@pytest.mark.usefixtures("little_effort")
def test_so_are_they_where_tp_groups_of_many_gpus_are_compared():
    inputs = inputs_of(sample_block=3, nodes=2)
    assert inputs.world_size > EVERY_PARTITION_UP_TO
    sizes = sizes_of(find_plan(inputs, stock=()).plan)
    assert sizes and not any(size % 3 for size in sizes)


def test_what_cannot_be_planned_is_told_at_once():
    with pytest.raises(PlannerInputError) as refused:
        inputs_of(
            SHARED,
            batch=25,
            profile=profile_with(),
            space=SearchSpace(requested_tensor_parallel=2),
            sample_block=4,
        )
    assert [each.where for each in refused.value.problems] == [
        "--micro-batch-size",
        "--tensor-model-parallel-size",
        "profile",
    ]


def told(plan, model):
    found = Workload(model=model, dtype=None, global_batch_size=None)
    return [(each.where, each.found.split(",")[0]) for each in workload_problems(plan, found)]


def test_plans_of_other_models_are_refused():
    def plan_for(model):
        made = plan_of((replica(0),), layers=4)
        return replace(made, model=model.fingerprint())

    assert not told(plan_for(MODEL), MODEL) and not told(plan_for(DENSE), DENSE)
    assert told(plan_for(DENSE), MODEL) == [("plan: model.num_experts", "0")]
    assert told(plan_for(MODEL), DENSE) == [("plan: model.num_experts", "16")]
    other = replace(MODEL, experts=replace(EXPERTS, per_token=2, ffn_hidden_size=8))
    assert told(plan_for(MODEL), other) == [
        ("plan: model.moe_router_topk", "4"),
        ("plan: model.moe_ffn_hidden_size", "768"),
    ]
    some = replace(MODEL, dense_layers=(1,))
    assert told(plan_for(MODEL), some) == [("plan: model.moe_layer_freq", "[1")]
    assert told(plan_for(some), MODEL) == [("plan: model.moe_layer_freq", "[1")]
    assert not told(plan_for(some), some)
    assert told(plan_for(MODEL), replace(MODEL, num_layers=5)) == [("plan: model.num_layers", "4")]
    # A plan that says nothing of its model is for any.
    assert not told(plan_of((replica(0),), layers=4), MODEL)


def test_shared_experts_are_whole_on_every_rank():
    assert not told(plan_of((replica(0, 1),), layers=4), MODEL)
    assert told(plan_of((replica(0, 1),), layers=4), SHARED) == [
        ("plan: ranks of a replica", "2 ranks of a tensor-parallel group")
    ]


# In tensor-parallel groups.


def compositions(total, parts):
    if parts == 1:
        return [(total,)]
    return [
        (first, *rest)
        for first in range(total + 1)
        for rest in compositions(total - first, parts - 1)
    ]


@given(total=st.integers(1, 9), speeds=st.lists(st.floats(0.01, 1.0), min_size=1, max_size=4))
def test_experts_are_dealt_as_brute_force_does(total, speeds):
    def longest(counts):
        return max(count / speed for count, speed in zip(counts, speeds, strict=True))

    counts = dealt(total, speeds)
    best = min(map(longest, compositions(total, len(speeds))))
    assert sum(counts) == total and longest(counts) == pytest.approx(best)


def test_ranks_have_their_experts_and_all_have_the_router():
    models = CostModels(
        cluster=cluster(),
        model=MODEL,
        profile=Profile(schema_version=1, sources=(Source(name="none", kind="analytic"),)),
        dtype="float16",
        computing=Computing(attention="flash"),
    )
    shards = TpShards(kv_groups=(12, 4, 0), experts=(5, 0, 11))
    ranks = [
        models.of_rank(TpShard(degree=3, tp_shards=shards, index=index), None) for index in range(3)
    ]
    whole = NUMBER * HIDDEN + 2 * HIDDEN  # router and norms
    head = 4 * 64 * HIDDEN  # of query, key, value and projection
    for rank, (heads, held) in zip(ranks, ((12, 5), (4, 0), (0, 11)), strict=True):
        assert rank.memory.layer_parameters() == heads * head + held * EXPERT + whole
    # Every micro-batch reads an expert's weights, and adds to their gradients, on one rank.
    small = [rank.compute.layer(KIND, 1) for rank in ranks]
    assert small[2].backward_s > small[0].backward_s > small[1].backward_s
    cut = models.cut_parameters("layer")
    assert cut == {"kv_groups": MODEL.attention_parameters, "experts": NUMBER * EXPERT}
    with_one = replace(MODEL, experts=replace(EXPERTS, shared_ffn_hidden_size=3 * HIDDEN))
    columns = {"mlp_columns": 3 * 3 * HIDDEN * HIDDEN}
    assert replace(models, model=with_one).cut_parameters("layer") == cut | columns


def test_what_a_rank_of_a_tp_group_does_however_few_experts_it_has():
    some = replace(MODEL, experts=ExpertsOfRank(**vars(EXPERTS), held=3))
    one = replace(some, seq_length=1)
    # Below compute capability 8.0 experts are a loop of kernels.
    costs = AnalyticCompute(one, dtype="float16", tensor_parallel=2)
    slow = AnalyticCompute(replace(MODEL, seq_length=1), dtype="float16", tensor_parallel=2)
    assert costs.layer("V100-32", 1).forward_s < slow.layer("V100-32", 1).forward_s
    fast = {"V100-32": replace(GPU_KINDS["V100-32"], memory_bytes_per_s=1e18)}
    costs = AnalyticCompute(one, dtype="float16", kinds=fast, tensor_parallel=2)
    assert costs.layer("V100-32", 1).forward_s == pytest.approx(100e-6 + 3 * 15e-6)
    # Rows of all experts are sorted and go through the activation.
    rotary = 2 * (HIDDEN + HIDDEN) // 2
    per_token = 10 * HIDDEN + rotary + 3 * CHOSEN * WIDTH
    assert elementwise_bytes(some, 2, 2) == 2 * TOKENS * per_token
    # With sequence parallelism it keeps the router's whole input, recomputed norms or not.
    kept = LayerActivations(
        model=some, element_bytes=2, computing=Computing(modules=("layernorm",))
    )
    whole, again = (
        Counter(kept.tensor_bytes(mode, tensor_parallel=2, sequence_parallel=True))
        for mode in ("none", "selective")
    )
    # What attention's norm has given it is there for a half of the sequence.
    assert whole - again == Counter([TOKENS * HIDDEN])


def test_placements_of_experts_are_near_the_best_of_all():
    """8 experts on three unlike GPUs, in one tensor-parallel group."""
    text = b"nodes:\n  - {name: a, gpus: [A100-40, V100-32, T4], link: PCIe 20 GB/s}\n"
    model = replace(MODEL, experts=replace(EXPERTS, num_experts=8), vocab_size=1024)
    inputs = make_inputs(parse_cluster(text), model, None, global_batch_size=16, dtype="float16")

    def seconds(tp_shards):
        one = replace(replica(0, 1, 2), tp_shards=tp_shards, micro_batch_size=4, num_microbatches=4)
        plan = replace(plan_of((one,), layers=4), model=model.fingerprint(), global_batch_size=16)
        return simulate(plan, inputs).iteration_s

    tried = tp_shards_to_try(inputs, (0, 1, 2))
    best = min(map(seconds, tried))
    others = {(each.kv_groups, each.vocabulary_rows) for each in tried}
    every = min(
        seconds(TpShards(kv_groups=groups, vocabulary_rows=rows, experts=counts))
        for groups, rows in others
        for counts in compositions(8, 3)
    )
    assert every <= best < 1.02 * every


# Adapters of attention, beside experts that stay as they are.

LORA = parse_lora("rank=8,alpha=16,targets=q,v", [])


def test_experts_have_no_adapters():
    lora = parse_lora("rank=8,alpha=16,targets=q,gate,up", [])
    (problem,) = misfits(lora, MODEL)
    assert problem.found == "targets gate,up, and 16 experts in a layer"
    assert not list(misfits(lora, DENSE)) and not list(misfits(LORA, MODEL))


def test_frozen_experts_are_read_backward_and_nothing_is_added_up():
    frozen = replace(USUAL, lora=replace(LORA, targets=()))
    costs = AnalyticCompute(MODEL, dtype="bfloat16", computing=frozen)
    there, back = (each.bytes_per_parameter for each in traffic_of("bfloat16"))
    others = ATTENTION + NUMBER * HIDDEN + 2 * HIDDEN
    spared_s = (back - there) * others / GPU_KINDS[KIND].memory_bytes_per_s
    for size in (8, 32):
        forward_s, backward_s, weights_s = seconds_by_hand(size)
        times = costs.layer(KIND, size)
        assert times.forward_s == pytest.approx(forward_s)
        assert times.backward_s == pytest.approx(backward_s - weights_s - spared_s)
        assert costs.weight_gradients_s(KIND, size) == 0.0


def test_frozen_experts_are_where_they_are_held():
    """2 bytes for each parameter, layer by layer; adapters alone have gradients and state."""
    model = replace(MODEL, dense_layers=(0,))
    inputs = inputs_of(model, lora=LORA)
    shared = ExpertParallel(experts=(3, NUMBER - 3), samples=(4, 2))
    pair = replica(0, 1, size=6, count=2, expert_parallel=shared)
    plan = plan_of([pair, replica(2, size=6)], [replica(3, count=24)], layers=4)
    sizes = RankSizes(replace(plan, model=inputs.model), inputs)
    layer, ends = model.layer_parameters(), model.embedding_parameters()
    dense = model.dense.layer_parameters()
    for rank, missing in enumerate((NUMBER - 3, 3, 0)):
        assert sizes.frozen_bytes(rank, 0) == 2 * (dense + layer - missing * EXPERT + ends)
        assert sizes.held(rank, 0) == 2 * LORA.layer_parameters(model)
    assert sizes.frozen_bytes(3, 1) == 2 * (2 * layer + model.head_parameters())


@pytest.mark.slow
@pytest.mark.usefixtures("little_effort", "few_layouts")
@pytest.mark.parametrize(
    ("name", "where"), [("olmoe-1b-7b", "mini-b.yaml"), ("qwen3-30b-a3b", "mini-a.yaml")]
)
def test_known_models_on_example_clusters(name, where, tmp_path, monkeypatch):
    run = runner_in(tmp_path, monkeypatch)
    given = ("--cluster", str(EXAMPLES / where), "--model", name)
    words = ("--global-batch-size", "32", "--use-all", "--max-tp", "1", "--out", "p.json")
    made = run("plan", *given, *words)
    assert made.exit_code == 0, made.output
    assert "--num-experts" in made.stdout and "--moe-ffn-hidden-size" in made.stdout
    assert run("explain", "p.json", *given).exit_code == 0
    assert "num_experts" in run("explain", "p.json", *given[:3], "llama-7b").output
