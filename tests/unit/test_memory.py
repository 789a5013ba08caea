"""Memory of a layer, a process, and a replica with settings of its own, against sums by hand."""

import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.measured import imported, needs_measured
from tests.strategies import lowerable_plans
from tests.unit.cli_samples import runner_in
from tests.unit.fake_costs import FakeComm, FakeCompute, FakeMemory
from tests.unit.made_plans import even_plan, one_group
from tests.unit.profile_samples import good as good_profile
from tests.unit.simulation import run
from zorse_megatron.costs.model_memory import (
    LayerActivations,
    TransformerMemory,
    memory_from_profile,
    precision_of,
)
from zorse_megatron.costs.process_memory import (
    communicator_bytes,
    deadlock_risk,
    fixed_bytes,
    fixed_items,
    most_bytes,
    process_items,
)
from zorse_megatron.errors import PlanError
from zorse_megatron.gpus.known_gpus import GPU_KINDS
from zorse_megatron.inputs.cluster_yaml import parse_cluster
from zorse_megatron.inputs.model import MODELS, Computing
from zorse_megatron.inputs.profile import parse_profile
from zorse_megatron.plan.memory_settings import settings_by_rank
from zorse_megatron.plan.plan import Offload, Recompute
from zorse_megatron.planner.inputs.search_inputs import make_inputs
from zorse_megatron.schedule.actions import Kind
from zorse_megatron.schedule.communicators import Communicator
from zorse_megatron.schedule.lower import lower_plan, refuse_unlowered, refuse_unsupported
from zorse_megatron.schedule.validate import check_executable
from zorse_megatron.simulate.result import host_bytes

GPT, LLAMA = MODELS["gpt-6.7b"], MODELS["llama-7b"]


def memory(model=LLAMA, dtype="bfloat16", **options):
    return TransformerMemory(model=model, dtype=dtype, precision=precision_of(dtype), **options)


@pytest.mark.parametrize(
    ("dtype", "gradient", "total"),
    [("bfloat16", 4, 18), ("float16", 2, 16), ("float32", 4, 16), ("tf32", 4, 16)],
)
def test_bytes_of_a_parameter(dtype, gradient, total):
    precision = precision_of(dtype, gradient_bytes=gradient)
    cost = TransformerMemory(model=LLAMA, dtype=dtype, precision=precision)
    parts = (cost.parameter_bytes(1000), cost.gradient_bytes(1000), cost.state_bytes(1000))
    assert sum(parts) == 1000 * total


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_activations_are_those_of_korthikanti(ranks):
    """Equations 1, 2 and 4 of arXiv 2205.05198, section 4."""
    s, h, a = GPT.seq_length, GPT.hidden_size, GPT.num_attention_heads
    layer = LayerActivations(
        model=GPT,
        element_bytes=2,
        attention="unfused",
        computing=Computing(hidden_dropout=True, attention_dropout=True),
    )
    plain = layer.bytes_per_sample("none", tensor_parallel=ranks)
    assert plain == s * h * (10 + 24 // ranks) + 5 * a * s * s // ranks
    split = layer.bytes_per_sample("none", tensor_parallel=ranks, sequence_parallel=True)
    assert split == (34 * s * h + 5 * a * s * s) // ranks
    selective = layer.bytes_per_sample("selective", tensor_parallel=ranks)
    assert selective == s * h * (10 + 24 // ranks)
    assert layer.bytes_per_sample("full", tensor_parallel=ranks) == 2 * s * h


def test_flash_attention_keeps_no_scores():
    s, h = GPT.seq_length, GPT.hidden_size
    layer = LayerActivations(model=GPT, element_bytes=2, computing=Computing(hidden_dropout=True))
    assert layer.bytes_per_sample("none") == 34 * s * h + 4 * s * GPT.num_attention_heads
    assert layer.bytes_per_sample("selective") == 34 * s * h


def test_llama_by_hand():
    # Four inputs of width 4096, query, key, value and projection input 4 x 4096, gate and up
    # 2 x 11008, down 11008; bfloat16; and a float32 for each of 32 heads.
    per_token = 2 * (8 * 4096 + 3 * 11008) + 4 * 32
    assert memory().activation_bytes(3, "none") == 3 * 2048 * per_token
    assert memory().activation_bytes(3, "full") == memory().boundary_bytes(3)


def test_tensor_parallel_and_sequence_parallel():
    both = memory(tensor_parallel=4, sequence_parallel=True)
    assert both.activation_bytes(1, "none") == memory().activation_bytes(1, "none") // 4
    assert both.boundary_bytes(1) == memory().boundary_bytes(1) // 4
    assert memory(tensor_parallel=4).boundary_bytes(1) == memory().boundary_bytes(1)
    assert memory(tensor_parallel=4).head_parameters(tied_on_same_rank=False) < 33e6


def test_head():
    # bfloat16 product, float32 softmax, bfloat16 gradient; input and output of the final norm.
    assert memory().head_bytes(2) == 2 * 2048 * (32000 * 8 + 2 * 4096 * 2)
    assert memory(dtype="float32").head_bytes(1) == 2048 * (32000 * 8 + 2 * 4096 * 4)


def test_tied_head():
    tied = memory(dataclasses.replace(LLAMA, tied_embeddings=True))
    assert tied.head_parameters(tied_on_same_rank=True) == 4096
    assert tied.head_parameters(tied_on_same_rank=False) == 4096 + 32000 * 4096
    assert memory().head_parameters(tied_on_same_rank=True) == 4096 + 32000 * 4096


@given(
    st.sampled_from(sorted(MODELS)),
    st.integers(1, 8),
    st.sampled_from(["flash", "unfused"]),
    st.booleans(),
)
def test_recomputing_more_keeps_less(name, size, attention, has_dropout):
    computing = Computing(hidden_dropout=has_dropout, attention_dropout=has_dropout)
    cost = memory(MODELS[name], attention=attention, computing=computing)
    kept = [cost.activation_bytes(size, mode) for mode in ("none", "selective", "full")]
    assert kept[0] > kept[1] > kept[2] == cost.boundary_bytes(size)
    assert kept[0] == size * cost.activation_bytes(1, "none")


def _deviation(entry, profile):
    """Ours over theirs: elements of a layer and what it hands on, scores kept once."""
    model = profile.model_named(entry.model)
    layer = LayerActivations(model=model, element_bytes=1, attention="unfused")
    ours = layer.bytes_per_sample("none", tensor_parallel=entry.tensor_parallel)
    return ours / (entry.activation_elements + entry.output_elements) - 1


@needs_measured
def test_against_the_activations_that_sailor_counted():
    """OPT's layers are plain Megatron; GPT-Neo and Llama keep more in PyTorch without fusion.

    docs/simulator.md states these errors.
    """
    profile = imported().profile
    errors = {
        (entry.model, entry.tensor_parallel): _deviation(entry, profile)
        for entry in profile.memory
        if entry.part == "layer"
    }
    opt = [abs(error) for (model, _), error in errors.items() if model.startswith("OPT")]
    assert len(opt) == 7
    assert max(opt) < 0.0005
    others = [error for (model, _), error in errors.items() if not model.startswith("OPT")]
    assert -0.21 < min(others) < max(others) < -0.04
    assert sum(map(abs, errors.values())) / len(errors) == pytest.approx(0.053, abs=0.0005)


@needs_measured
def test_against_the_heads_that_sailor_counted():
    """Logits in float32 twice, and the norm: within 2 % where the head is a matrix of its own."""
    profile = imported().profile
    errors = []
    for entry in profile.memory:
        if entry.part == "head" and entry.model.startswith("OPT"):
            model = profile.model_named(entry.model)
            cost = memory(model, "float32", tensor_parallel=entry.tensor_parallel)
            own_input = model.seq_length * model.hidden_size
            errors.append(cost.head_bytes(1) / 4 / (entry.activation_elements + own_input) - 1)
    assert len(errors) == 7
    assert max(map(abs, errors)) < 0.02


@needs_measured
def test_measured_layers_take_the_place_of_the_formula():
    profile = imported().profile
    model = profile.model_named("OPT-350")
    cost = memory_from_profile(profile, memory(model, "float32", tensor_parallel=4))
    entry = next(
        each
        for each in profile.memory
        if (each.model, each.part, each.tensor_parallel) == ("OPT-350", "layer", 4)
    )
    elements = entry.activation_elements + entry.output_elements
    assert cost.activation_bytes(2, "none") == 2 * 4 * elements
    assert cost.activation_bytes(2, "full") == cost.boundary_bytes(2)
    with pytest.raises(LookupError, match="no memory of the layer of llama-7b"):
        memory_from_profile(profile, memory(LLAMA, "float32"))


# Beside tensors.

MIB = 2**20
CONTEXT, WORKSPACES = 484 * MIB, 8_519_680 + 4 * MIB


def test_workspaces_are_larger_from_hopper_on():
    sizes = {kind: [i.num_bytes for i in process_items(GPU_KINDS[kind])] for kind in GPU_KINDS}
    assert sizes["T4"] == sizes["V100-16"] == sizes["A100-40"] == [CONTEXT, WORKSPACES]
    assert sizes["H100-80"] == sizes["B200"] == [CONTEXT, 64 * MIB + 256]


@pytest.mark.parametrize(
    ("use", "ranks", "rank", "expected"),
    [
        ("link", (3, 5), 5, 10),  # one channel's buffers where it arrives
        ("link", (3, 5), 3, 2),
        ("group", (3, 5), 3, 12),  # a ring: one before, one after
        ("group", (3, 5, 7), 5, 12),
        ("world", (3, 5), 3, 12),
        ("world", (1, 2, 3, 4, 5), 3, 36),  # a tree: three, in both directions
    ],
)
def test_channels_of_a_communicator(use, ranks, rank, expected):
    communicator = Communicator(use=use, ranks=ranks)
    assert communicator_bytes(communicator, rank, 1) == expected * MIB
    assert communicator_bytes(communicator, rank, 4) == 4 * expected * MIB


def test_items_of_a_small_plan_by_hand():
    """Two groups of two T4s, each linked to one rank of the other group in both directions: of the
    quarter of 40 multiprocessors each of four communicators has 2."""
    plan = even_plan(2, 2, 4)
    items = fixed_items(plan, [GPU_KINDS["T4"]] * 4)
    expected = {
        "CUDA context": CONTEXT,
        "cuBLAS workspaces": WORKSPACES,
        "NCCL: 1 x world": 4 * 36 * MIB,
        "NCCL: 1 x group": 2 * 12 * MIB,
        "NCCL: 2 x link": 2 * (10 + 2) * MIB,
    }
    assert all({i.name: i.num_bytes for i in each} == expected for each in items)
    assert fixed_bytes(plan, [GPU_KINDS["T4"]] * 4) == (sum(expected.values()),) * 4
    assert sum(expected.values()) <= most_bytes(GPU_KINDS["T4"])


def test_a_plan_whose_kernels_may_fill_a_gpu_says_so():
    plan = even_plan(2, 12, 12)
    small = dataclasses.replace(GPU_KINDS["T4"], multiprocessors=4)
    assert deadlock_risk(plan, [small] * 24) is not None
    assert deadlock_risk(plan, [GPU_KINDS["T4"]] * 24) is None
    assert len(fixed_bytes(plan, [small] * 24)) == 24


def test_what_a_profile_measured_of_a_kind_takes_the_place_of_the_constant():
    value = good_profile()
    source = value["sources"][0]["name"]
    value["processes"] = [{"gpu_kind": "T4", "context_bytes": 300 * MIB, "source": source}]
    inputs = make_inputs(
        parse_cluster(b"nodes: [{gpus: [2 x T4, 1 x A100-40]}]"),
        MODELS["llama-1b"],
        parse_profile(json.dumps(value).encode()),
        global_batch_size=4,
        dtype="float16",
    )
    plain = [GPU_KINDS[kind] for kind in inputs.kinds]
    recompute_savings = [
        most_bytes(gpu) - most_bytes(inputs.gpus[kind])
        for gpu, kind in zip(plain, inputs.kinds, strict=True)
    ]
    assert recompute_savings == [184 * MIB, 184 * MIB, 0]


def test_simulated_peaks_have_them(tmp_path, monkeypatch):
    run = runner_in(tmp_path, monkeypatch)
    command = ("explain", "plan.json", "--cluster", "cluster.yaml", "--model", "model.json")
    ranks = json.loads(run(*command, "--json").stdout)["ranks"]
    for rank in ranks:
        assert rank["at_peak_bytes"]["fixed"] > CONTEXT + WORKSPACES
        assert sum(rank["at_peak_bytes"].values()) == rank["peak_memory_bytes"]
    said = run(*command).stdout
    assert "CUDA context 484 MiB, cuBLAS workspaces 12.1 MiB" in " ".join(said.split())


# A replica's own settings.

FULL, SELECTIVE = Recompute(mode="full"), Recompute(mode="selective")
STATE = Offload(optimizer_state=True)


def told(plan, *own, **of_group):
    """The plan of one group whose replicas have settings of their own; None: none."""
    (group,) = plan.groups
    replicas = tuple(
        dataclasses.replace(replica, **(more or {}))
        for replica, more in zip(group.replicas, own, strict=True)
    )
    group = dataclasses.replace(group, replicas=replicas, **of_group)
    return dataclasses.replace(plan, groups=(group,))


def test_a_replica_overrides_its_group():
    plan = one_group((1, 1), (1, 1))
    plan = told(
        plan, {"recompute": SELECTIVE}, {"offload": Offload()}, recompute=FULL, offload=STATE
    )
    found = settings_by_rank(plan)
    assert [found[rank].recompute for rank in range(2)] == [SELECTIVE, FULL]
    assert [found[rank].offload for rank in range(2)] == [STATE, Offload()]


# Rules.


def test_what_is_refused_names_the_place_that_says_it():
    refuse_unsupported(told(one_group((1, 1)), {"offload": Offload(activations=True)}))
    plan = told(one_group((1, 1), (1, 1)), None, {"offload": Offload(parameters=True)})
    with pytest.raises(PlanError) as caught:
        refuse_unlowered(plan)
    assert [problem.where for problem in caught.value.problems] == [
        "groups[0].replicas[1].offload.parameters"
    ]


# Lists.


def moved_to_replicas(plan):
    """The same settings, said by every replica instead of the group."""
    groups = []
    for group in plan.groups:
        replicas = tuple(
            dataclasses.replace(
                replica,
                recompute=replica.recompute or group.recompute,
                offload=replica.offload or group.offload,
            )
            for replica in group.replicas
        )
        groups.append(dataclasses.replace(group, replicas=replicas, recompute=None, offload=None))
    return dataclasses.replace(plan, groups=tuple(groups))


def said_by_groups(plan, offloads):
    """All ranks of a group offload the same, as it says."""
    groups = tuple(
        dataclasses.replace(
            group,
            offload=offloads[number],
            replicas=tuple(dataclasses.replace(r, offload=None) for r in group.replicas),
        )
        for number, group in enumerate(plan.groups)
    )
    return dataclasses.replace(plan, groups=groups)


@pytest.mark.slow
@settings(deadline=None, max_examples=examples(60))
@given(lowerable_plans())
def test_lists_of_mixed_groups(plan):
    """Of a group with ranks that offload shards: the copies, on these ranks alone."""
    lists = lower_plan(plan)
    check_executable(lists, [r.ranks for group in plan.groups for r in group.replicas])
    assert lower_plan(moved_to_replicas(plan)) == lists
    found = settings_by_rank(plan)
    some = [
        Offload(
            parameters=any(found[rank].offload.parameters for rank in group.ranks),
            gradients=any(found[rank].offload.gradients for rank in group.ranks),
        )
        for group in plan.groups
    ]
    for rank, actions in enumerate(lower_plan(said_by_groups(plan, some)).ranks):
        own = found[rank].offload
        copies = set() if own.parameters else {Kind.FETCH, Kind.OFFLOAD}
        copies |= set() if own.gradients else {Kind.OFFLOAD_GRAD}
        assert lists.ranks[rank] == tuple(a for a in actions if a.kind not in copies)


# Time and memory.


def test_each_replica_takes_its_own_time_and_memory():
    plan = one_group((1, 2), (1, 2), (1, 2), layers=4, weights=[1.0, 1.0, 1.0])
    own = {"recompute": FULL}, {"recompute": Recompute(mode="full", num_layers=1)}, None
    compute = FakeCompute(recomputed_s={"full": 1.0})
    mixed = run(told(plan, *own), compute=compute)
    for rank, of_group in enumerate(own):
        alone = run(told(plan, None, None, None, **(of_group or {})), compute=compute)
        assert mixed.usage[rank].busy_s == alone.usage[rank].busy_s
        assert mixed.memory[rank].total_bytes == alone.memory[rank].total_bytes
    busy_s = [usage.busy_s for usage in mixed.usage]
    assert busy_s[0] - busy_s[2] == pytest.approx(2 * 4)
    assert busy_s[1] - busy_s[2] == pytest.approx(2 * 1)
    # The slowest replica decides.
    assert mixed.iteration_s == run(told(plan, *[None] * 3, **own[0]), compute=compute).iteration_s


def test_each_replica_offloads_its_own():
    plan = one_group((1, 3), (1, 3), layers=2)
    comm = FakeComm(host_bytes_per_s=50_000.0)
    both = Offload(optimizer_state=True, activations=True)
    own = {"offload": both, "recompute": FULL}, None
    mixed = run(told(plan, *own), comm=comm)
    for rank, of_group in enumerate(own):
        alone = run(told(plan, None, None, **(of_group or {})), comm=comm)
        assert dict(host_bytes(mixed, rank)) == dict(host_bytes(alone, rank))
        assert mixed.memory[rank].total_bytes == alone.memory[rank].total_bytes
    assert host_bytes(mixed, 0)
    assert not host_bytes(mixed, 1)


def test_replicas_of_other_settings_are_simulated_apart():
    plan = one_group((1, 2), (1, 2), (1, 2), (1, 2), layers=4)
    memory = FakeMemory(layer_count=64 * 48)
    plan = told(plan, None, {"recompute": FULL}, None, {"offload": STATE})
    merged = run(plan, memory=memory, merge_equal_ranks=True)
    assert merged.stands_in == (0, 1, 0, 3)
    whole = run(plan, memory=memory)
    assert merged.iteration_s == whole.iteration_s
    assert [m.total_bytes for m in merged.memory] == [m.total_bytes for m in whole.memory]
