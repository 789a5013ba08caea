"""What adapters cost: memory, traffic, times, and plans for GPUs that cannot train all weights."""

import json
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.cli_samples import FLAGS, WORKLOAD, lab_plan, runner_in
from tests.unit.fake_tp_costs import RingComm
from tests.unit.made_plans import plan_of, replica
from zorse_megatron.costs.analytic_compute import AnalyticCompute, shares_of, traffic_of
from zorse_megatron.costs.communication import TpCollectives
from zorse_megatron.costs.interface import TpShard, TpTraits
from zorse_megatron.costs.model_memory import (
    LayerActivations,
    TransformerMemory,
    memory_from_profile,
    precision_of,
)
from zorse_megatron.costs.profiled_compute import ProfiledCompute
from zorse_megatron.gpus.known_gpus import GPU_KINDS
from zorse_megatron.inputs.cluster_yaml import parse_cluster
from zorse_megatron.inputs.lora import Lora, parse_lora
from zorse_megatron.inputs.model import MODELS, USUAL, Computing, ModelShape
from zorse_megatron.inputs.profile import parse_profile
from zorse_megatron.plan.plan import TpShards
from zorse_megatron.planner.closed_form.device_groups import (
    DeviceGroups,
    MemorySettings,
    Stage,
    StagePosition,
)
from zorse_megatron.planner.closed_form.stage_memory import StageMemory
from zorse_megatron.planner.find_plan import find_plan
from zorse_megatron.planner.inputs.search_inputs import SearchSpace, make_inputs
from zorse_megatron.planner.outcome import NoPlanError
from zorse_megatron.planner.simulate_plan import simulate_plan
from zorse_megatron.simulate.memory_ledger import Category, memory_over_time
from zorse_megatron.simulate.rank_bytes import RankSizes

KIND, LAYERS, RANK, HIDDEN, FFN, QUERY, KEY = "A100-40", 4, 8, 1024, 4096, 1024, 512
MODEL = ModelShape(
    name="small",
    num_layers=LAYERS,
    hidden_size=HIDDEN,
    ffn_hidden_size=FFN,
    num_attention_heads=16,
    num_query_groups=8,
    kv_channels=64,
    vocab_size=32000,
    seq_length=512,
    activation="swiglu",
    norm="rmsnorm",
    linear_bias=False,
)
MATRICES = HIDDEN * (2 * QUERY + 2 * KEY + 3 * FFN)
LAYER, TABLE = MATRICES + 2 * HIDDEN, 32000 * HIDDEN
# q, o, k and v, gate and up, down: A and B of each.
IN_AND_OUT = 2 * (HIDDEN + QUERY) + 2 * (HIDDEN + KEY) + 3 * (HIDDEN + FFN)
ADAPTERS = RANK * IN_AND_OUT


def lora_of(targets: str) -> Lora:
    found = parse_lora(f"rank={RANK},alpha=16,targets={targets}", [])
    assert found is not None
    return found


ALL = lora_of("q,k,v,o,gate,up,down")


def inputs_on(gpus: int, *, model=MODEL, lora: Lora | None = ALL, **computing):
    return make_inputs(
        parse_cluster(f"nodes: [{{gpus: {gpus} x {KIND}}}]".encode()),
        model,
        None,
        global_batch_size=8,
        dtype="bfloat16",
        computing=replace(USUAL, lora=lora, **computing),
    )


# Memory.


def test_frozen_weights_are_whole_and_all_else_is_of_adapters():
    """2 bytes for each weight and adapter, 4 for gradients, 12 / 2 for a shard of the state."""
    inputs = inputs_on(2)
    plan = plan_of([replica(0, count=4), replica(1, count=4)], layers=LAYERS)
    result = simulate_plan(inputs, plan)
    for memory in result.memory:
        found = memory.by_category_bytes
        weights = LAYERS * LAYER + 2 * TABLE + HIDDEN
        assert found[Category.PARAMETERS] == 2 * (weights + LAYERS * ADAPTERS)
        assert found[Category.GRADIENTS] == 4 * LAYERS * ADAPTERS
        assert found[Category.OPTIMIZER_STATE] == 12 * LAYERS * ADAPTERS / 2
    sizes = RankSizes(plan, inputs)
    assert sum(map(sum, sizes.pieces(0, (0, 1)))) == LAYERS * ADAPTERS


def test_what_moves_of_released_parameters_is_adapters():
    """Two groups in turn, two chunks each: a GPU never has less than its frozen weights."""
    inputs = inputs_on(4)
    groups = [[replica(2 * n, count=4), replica(2 * n + 1, count=4)] for n in range(2)]
    plan = plan_of(*groups, owners=(0, 1, 0, 1), schedule="breadth_first")
    result = simulate_plan(inputs, plan)
    for rank, ends in ((0, TABLE), (2, TABLE + HIDDEN)):
        frozen = 2 * (2 * LAYER + ends)
        steps = memory_over_time(result.timeline, rank)
        found = [step.by_category_bytes[Category.PARAMETERS] for step in steps]
        assert min(found) == frozen + 2 * 2 * ADAPTERS / 2  # a shard of both layers' adapters
        assert max(found) == frozen + 2 * 2 * ADAPTERS


@pytest.mark.parametrize("tied", [False, True])
def test_a_tied_table_has_a_copy_on_the_last_gpu_and_no_gradients(tied):
    inputs = inputs_on(2, model=replace(MODEL, tied_embeddings=tied))
    plan = plan_of(*([replica(rank, count=8)] for rank in range(2)), layers=LAYERS)
    plan = replace(plan, model=inputs.model)
    result = simulate_plan(inputs, plan)
    last = result.memory[1].by_category_bytes[Category.PARAMETERS]
    assert last == 2 * (2 * (LAYER + ADAPTERS) + TABLE + HIDDEN)
    assert RankSizes(plan, inputs).tied_swaps == {}


@pytest.mark.parametrize("lora", [None, ALL])
def test_the_planners_closed_form_is_the_simulators(lora):
    inputs = inputs_on(2, lora=lora)
    plan = plan_of([replica(0, count=4), replica(1, count=4)], layers=LAYERS)
    peaks = [memory.total_bytes for memory in simulate_plan(inputs, plan).memory]
    memory, count = StageMemory(inputs), 4.0
    position = StagePosition(is_first=True, is_last=True, in_flight_limit=2.0)
    stage = Stage(DeviceGroups(inputs).of((0, 1)), LAYERS, (1,), position)
    settings = MemorySettings()
    own = memory.local_bytes(stage, settings, 1, count, KIND)
    beside = inputs.fixed_bytes(plan) or (0, 0)
    assert [own + memory.shared_bytes(stage, settings) / 2 + each for each in beside] == peaks


def test_tp_groups_cut_one_factor_of_each_adapter():
    """B of q, k, v, gate and up, A of o and down; the others are whole."""
    inputs = inputs_on(2)
    cut = RANK * (QUERY + 2 * KEY + QUERY + 2 * FFN + FFN)
    plan = plan_of([replica(0, 1, count=8)], layers=LAYERS)
    sizes = RankSizes(plan, inputs)
    assert sizes.held(0, 0) == LAYERS * (ADAPTERS - cut // 2)
    assert sizes.summed_in_tp_groups(0) == 0
    split = inputs_on(2, sequence_parallel=True)
    assert RankSizes(plan, split).summed_in_tp_groups(0) == LAYERS * (ADAPTERS - cut)
    assert sizes.frozen_bytes(1, 0) == 2 * (LAYERS * (MATRICES // 2 + 2 * HIDDEN) + TABLE + HIDDEN)
    uneven = TpShards(kv_groups=(6, 2), mlp_columns=(3072, 1024))
    parts = [TpShard(degree=2, tp_shards=uneven, index=index) for index in range(2)]
    held = [inputs.tp_costs.of_rank(part, None).memory for part in parts]
    assert sum(memory.layer_parameters() for memory in held) == 2 * ADAPTERS - cut
    frozen = [memory.frozen_parameters("layer") - 2 * HIDDEN for memory in held]
    assert frozen == [3 * MATRICES // 4, MATRICES // 4]


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_what_crosses_tp_groups_is_as_wide_as_the_rank(sequence_parallel):
    """A x of o and down forward, its gradient of q, k and v together, and of gate and up."""
    comm, ranks, activation = RingComm(bytes_per_s=100.0), (0, 1), 2 * HIDDEN
    bare, beside = (
        TpCollectives(
            comm=comm,
            traits=TpTraits(sequence_parallel=sequence_parallel, adapter_shares=shares),
        ).of("layer", ranks, activation, 1)
        for shares in (((), ()), lora_of("q,k,v,o,gate,up,down").crossing_shares(MODEL))
    )

    def of(time_s, *counts):
        return sum(time_s(ranks, (count * RANK,) * 2) for count in counts)

    def sum_of(*counts):
        return sum(comm.all_reduce_s(ranks, 2 * count * RANK) for count in counts)

    forward_s, backward_s = sum_of(1, 1), sum_of(3, 2)
    if sequence_parallel:
        gather_s, scatter_s = comm.all_gather_s, comm.reduce_scatter_s
        forward_s = of(gather_s, 3, 2) + of(scatter_s, 1, 1)
        backward_s = of(scatter_s, 3, 2) + of(gather_s, 1, 1)
    assert beside.forward_s - bare.forward_s == pytest.approx(forward_s)
    assert beside.backward_s - bare.backward_s == pytest.approx(backward_s)


def test_layers_keep_the_inputs_of_adapters():
    """Of a token: what each frozen matrix would not need, and the middle of each adapter."""

    def kept(targets, attention="flash"):
        lora = None if targets is None else lora_of(targets)
        layer = LayerActivations(
            model=MODEL, element_bytes=2, attention=attention, computing=Computing(lora=lora)
        )
        return layer.bytes_per_sample("none") / (2 * MODEL.seq_length)

    everything = kept(None)
    assert kept("q,k,v,o,gate,up,down") == everything + 7 * RANK
    assert kept("k") == everything - HIDDEN - FFN + RANK  # flash attention keeps its own output
    assert kept("down") == everything - 2 * HIDDEN + RANK
    assert kept("k", "unfused") == kept(None, "unfused") - QUERY - HIDDEN - FFN + RANK


# What was measured of all weights.


def measured(**more):
    """A profile of the model's layers on the GPU: 10 ms forward, 30 backward."""
    shape = {name: value for name, value in vars(MODEL).items() if name != "max_positions"}
    of = {"model": MODEL.name, "seq_length": MODEL.seq_length, "source": "lab"}
    times = {"part": "layer", "gpu_kind": KIND, "dtype": "bfloat16", "micro_batch_sizes": [1, 2]}
    seconds = {"forward_s": [0.01, 0.02], "backward_s": [0.03, 0.06]}
    kept = {"parameters": 1, "output_elements": 1, "activation_elements": 9 * 10**6}
    return parse_profile(
        json.dumps(
            {
                "schema_version": 1,
                "sources": [{"name": "lab", "kind": "measured", "origin": "by hand"}],
                "models": [shape],
                "times": [{**of, **times, **seconds, **more}],
                "memory": [{**of, **kept, "part": part} for part in ("layer", "head")],
            }
        ).encode()
    )


def test_measured_times_lose_the_gradients_of_weights_as_measured_or_as_estimated():
    def backward_s(profile, lora):
        computing = replace(USUAL, lora=lora)
        compute = ProfiledCompute(profile, MODEL, dtype="bfloat16", computing=computing)
        assert lora is None or compute.weight_gradients_s(KIND, 2) == 0
        return compute.layer(KIND, 2).backward_s

    none = replace(ALL, targets=())
    timed = measured(weight_gradients_s=[0.012, 0.024])
    assert backward_s(timed, none) == pytest.approx(0.06 - 0.024)
    whole, spared = (
        AnalyticCompute(MODEL, dtype="bfloat16", computing=replace(USUAL, lora=lora))
        for lora in (None, none)
    )
    share = spared.layer(KIND, 2).backward_s / whole.layer(KIND, 2).backward_s
    assert backward_s(measured(), none) == pytest.approx(0.06 * share)
    assert backward_s(timed, None) == 0.06 > backward_s(timed, ALL) > backward_s(timed, none)


def test_adapters_of_attention_leave_the_mlp_as_it_is():
    """But for the gradients of weights, which both lose; the two make up a layer."""

    def halves(targets):
        computing = replace(USUAL, lora=replace(ALL, targets=targets))
        compute = ProfiledCompute(measured(), MODEL, dtype="bfloat16", computing=computing)
        return compute.layer_in_two(KIND, 2), compute.layer(KIND, 2)

    (without, _), (found, layer) = halves(()), halves(("q", "k", "v", "o"))
    assert found.mlp.forward_s == pytest.approx(without.mlp.forward_s)
    assert found.mlp.backward_s == pytest.approx(without.mlp.backward_s)
    assert found.attention.forward_s > 1.01 * without.attention.forward_s
    assert found.attention.forward_s + found.mlp.forward_s == pytest.approx(layer.forward_s)


def test_measured_activations_lose_what_frozen_weights_do_not_keep():
    def memory_of(targets):
        return memory_from_profile(
            measured(),
            TransformerMemory(
                model=MODEL,
                dtype="bfloat16",
                precision=precision_of("bfloat16"),
                computing=replace(USUAL, lora=targets and lora_of(targets)),
            ),
        )

    before, after = memory_of(None), memory_of("k")
    unneeded = 2 * MODEL.seq_length * (HIDDEN + FFN - RANK)
    assert before.activation_bytes(1, "none") - after.activation_bytes(1, "none") == unneeded
    assert before.head_bytes(1) - after.head_bytes(1) == 2 * MODEL.seq_length * HIDDEN


# Times.


def test_backwards_lack_gradients_of_weights_and_adapters_take_their_own():
    gpu, size = GPU_KINDS[KIND], 4
    kind = {
        text: AnalyticCompute(MODEL, dtype="bfloat16", computing=replace(USUAL, lora=lora))
        for text, lora in (("all", None), ("adapters", ALL), ("none", replace(ALL, targets=())))
    }
    layers = {text: each.layer(KIND, size) for text, each in kind.items()}
    tokens = size * MODEL.seq_length
    shares, _ = shares_of([KIND], "bfloat16")
    peak = gpu.peak.of("bfloat16")
    there, back = (each.bytes_per_parameter for each in traffic_of("bfloat16"))
    gradients_s = 2 * tokens * MATRICES / (peak * shares.backward)
    gradients_s += (back - there) * LAYER / gpu.memory_bytes_per_s
    assert layers["all"].backward_s - layers["none"].backward_s == pytest.approx(gradients_s)
    assert layers["all"].forward_s == layers["none"].forward_s
    inputs = 5 * HIDDEN + QUERY + FFN
    outputs = QUERY + 2 * KEY + HIDDEN + 2 * FFN + HIDDEN
    added_s = 2 * tokens * ADAPTERS / (peak * shares.forward)
    moved = inputs + 4 * outputs + 2 * (QUERY + 2 * KEY + 2 * FFN)
    added_s += (2 * tokens * moved + there * ADAPTERS) / gpu.memory_bytes_per_s
    assert layers["adapters"].forward_s - layers["none"].forward_s == pytest.approx(added_s)
    assert kind["adapters"].embedding(KIND, size).backward_s == 0
    head, frozen = kind["all"].head(KIND, size), kind["adapters"].head(KIND, size)
    assert frozen.forward_s == head.forward_s and frozen.backward_s < 0.6 * head.backward_s


# Plans.


def test_a_model_that_is_too_large_to_train_is_planned_with_adapters():
    """8 billion parameters take 144 GB to train, and 16 GB beside adapters."""
    text = b"nodes:\n" + b"".join(
        b"  - {gpus: %s, host_memory: 32GiB, nics: 10 Gb/s}\n" % gpus
        for gpus in (b"2 x RTX3080", b"1 x RTX3090")
    )
    lora = parse_lora("rank=16,alpha=32,targets=q,k,v,o,gate,up,down", [])

    def found(adapters):
        inputs = make_inputs(
            parse_cluster(text),
            replace(MODELS["llama3-8b"], seq_length=1024),
            None,
            global_batch_size=16,
            dtype="bfloat16",
            computing=replace(USUAL, lora=adapters),
            space=SearchSpace(max_tensor_parallel=1, split_backward=False),
        )
        return inputs, find_plan(inputs)

    with pytest.raises(NoPlanError):
        found(None)
    inputs, outcome = found(lora)
    assert outcome.plan.model.lora == str(lora)
    peaks = outcome.plan.predictions.peak_memory_bytes
    assert all(map(int.__le__, peaks, inputs.capacities_bytes))
    assert sum(peaks) > 16e9  # all weights are somewhere


@pytest.fixture
def run(tmp_path, monkeypatch):
    return runner_in(tmp_path, monkeypatch)


def test_the_plan_carries_its_adapters_to_all_that_come_after(run, tmp_path):
    text = str(lora_of("q,v"))
    made = run("plan", *WORKLOAD, "--use-all", "--out", "p.json", "--lora", text, "--json")
    found = json.loads(made.stdout)
    assert found["plan"]["model"]["lora"] == text and found["stock"] is None
    count = 8 * RANK * (1024 + 1024 + 1024 + 1024)  # A and B of q and v in each layer
    said = f"LoRA ({text}) trains {count:,} parameters beside "
    assert said in " ".join(found["reasons"])
    words = shlex.split(found["next_command"])[1:]
    assert words[words.index("--zorse-lora") + 1] == text
    assert text in run(*words).output  # what each node is to run
    at = words.index("--zorse-lora")
    without = run(*words[:at], *words[at + 2 :])
    assert without.exit_code == 1 and "--zorse-lora: found no such flag" in without.output
    explained = json.loads(run("explain", "p.json", *WORKLOAD, "--json").stdout)
    assert explained["iteration_s"] == found["iteration_s"]
    flags_and_option = run("plan", "--cluster", "cluster.yaml", "--lora", text, "--", *FLAGS)
    assert "--lora: found" in flags_and_option.output
    stock = run("plan", *WORKLOAD, "--lora", text, "--strategy", "stock")
    assert stock.exit_code == 1 and "has no LoRA" in stock.output


@pytest.mark.parametrize(
    "given", [None, "rank=8,alpha=16,targets=q,v", "rank=8,alpha=16,targets=q"]
)
def test_a_run_is_refused_other_adapters_before_it_imports_torch(tmp_path, given):
    """It has too few ranks, too, which it says in any case."""
    text = "rank=8,alpha=16,targets=q,v"
    plan = lab_plan()
    path = tmp_path / "p.json"
    path.write_text(json.dumps(plan | {"model": plan["model"] | {"lora": text}}))
    words = ["-m", "zorse_megatron.pretrain", "--zorse-plan", str(path), *FLAGS]
    more = [] if given is None else ["--zorse-lora", given]
    root = Path(__file__).parents[2]
    started = subprocess.run(
        [sys.executable, *words, *more], cwd=root, capture_output=True, text=True, check=False
    )
    assert started.returncode and "Start 8 ranks" in started.stderr, started.stderr
    assert ("--zorse-lora: found" in started.stderr) == (given != text)
