"""Stock Megatron and plans train on emulated GPUs: their times, their losses, their memory.

Every duration is one of the emulated cluster, so it does not depend on how busy this machine is.
"""

import dataclasses
import json
import math
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from typer.testing import CliRunner

from scripts.validation.peaks import peaks_without
from tests.megatron.launch import default_server
from tests.megatron.plans import (
    chunked_plan,
    computing_in,
    plan_of,
    replica,
    split,
    tp_replica,
)
from tests.unit.fake_costs import FakeComm, FakeCompute
from zorse_megatron.cli.main import app
from zorse_megatron.costs.process_memory import fixed_bytes
from zorse_megatron.emulate import emulator as rank_server
from zorse_megatron.emulate.emulator import System, emulator, flags_of_grid
from zorse_megatron.emulate.on_ranks.model_sizes import ModelSizes
from zorse_megatron.emulate.rank_jobs import SERVER, RankJob
from zorse_megatron.emulate.tiny_model import (
    LORA_RANK,
    VOCABULARY,
    TinyShape,
    TinyTraining,
    lora_flags,
)
from zorse_megatron.inputs.cluster_yaml import load_cluster
from zorse_megatron.inputs.lora import Lora
from zorse_megatron.inputs.model import MODELS, USUAL, Experts
from zorse_megatron.plan.plan import Group, Offload, Recompute, Schedule, TpShards
from zorse_megatron.plan.plan_file import save_plan
from zorse_megatron.planner.baselines.stock_layouts import Grid, Placement, plan_of_grid
from zorse_megatron.planner.baselines.stock_search import framework_of
from zorse_megatron.planner.inputs.search_inputs import make_inputs, on_ranks
from zorse_megatron.planner.simulate_plan import simulate_plan
from zorse_megatron.simulate.assumptions import Perturbation, SlowSpell
from zorse_megatron.simulate.iteration import simulate
from zorse_megatron.simulate.memory_ledger import Category

LAYERS = 4
BATCH = 8
MODEL = dataclasses.replace(MODELS["llama-3b"], num_layers=LAYERS)
CLUSTER = Path(__file__).parents[2] / "examples" / "two-node-lab.yaml"
INPUTS = make_inputs(load_cluster(CLUSTER), MODEL, None, global_batch_size=BATCH, dtype="float16")
# A layer takes 1 s forward and 2 s backward for each sample, links take nothing.
ROUND_NUMBERS = dataclasses.replace(
    INPUTS,
    compute=FakeCompute(embedding_s=0.25, head_s=0.5, step_per_parameter_s=1e-9),
    comm=FakeComm(),
)
# GPUs 3 and 4 are on two nodes and of two kinds.
UNEVEN = plan_of(((replica(0, 2, 3, 3.0), replica(1, 1, 2, 1.0)), 3), ((replica(2, 1, 8),), 1))
MINISTAGES = chunked_plan(
    [(replica(0, 2, 3, 3.0), replica(1, 1, 2, 1.0)), (replica(2, 1, 8),)],
    [(0, 1), (1, 1), (0, 1), (1, 1)],
)
# The second rank computes nothing, but owns half of the first group's state.
IDLE = chunked_plan(
    [(replica(0, 2, 4), replica(1, 1, 0)), (replica(2, 1, 8),)], [(0, 1), (1, 2), (1, 1)]
)
GPUS = (2, 3, 4)


def changed(plan, recompute=None, schedule=None, **offload):
    """The plan with this recomputation, and this in the host, in all groups."""
    plan = dataclasses.replace(plan, schedule=schedule or plan.schedule)
    groups = tuple(
        dataclasses.replace(group, recompute=recompute, offload=Offload(**offload))
        for group in plan.groups
    )
    return dataclasses.replace(plan, groups=groups)


def in_flight(group: Group, most: int) -> Group:
    """Its replicas may keep so many samples times layers."""
    replicas = tuple(dataclasses.replace(each, max_in_flight=most) for each in group.replicas)
    return dataclasses.replace(group, replicas=replicas)


FULL = Recompute(mode="full")
_TWO_IN_FLIGHT = chunked_plan(
    [(replica(0, 1, 8),), (replica(1, 1, 8),), (replica(2, 2, 4),)],
    [(0, 1), (0, 1), (1, 1), (2, 1)],
)
ENDING_WITH_TWO = dataclasses.replace(
    changed(_TWO_IN_FLIGHT, schedule=Schedule(name="interleaved")),
    groups=(
        *(in_flight(group, 16) for group in _TWO_IN_FLIGHT.groups[:2]),
        dataclasses.replace(
            in_flight(_TWO_IN_FLIGHT.groups[2], 4), offload=Offload(activations=True)
        ),
    ),
)


def client_of_tests(module):
    """In place of the process that `emulator` starts: the one that forks the tests' ranks.

    That one preloads as this one does.
    """
    assert module == SERVER
    return SimpleNamespace(run=default_server().run_job, close=lambda: None)


@pytest.fixture(scope="module", autouse=True)
def _one_server():
    with patch.object(rank_server, "ForkClient", client_of_tests):
        yield


@pytest.fixture(scope="module")
def lab():
    training = TinyTraining(model=MODEL, global_batch_size=BATCH, iterations=2)
    with emulator(INPUTS, training) as made:
        yield made


@pytest.fixture(scope="module")
def stock_losses(lab):
    return run(lab, stock()).losses


def run(lab, system, inputs=INPUTS, **perturbation):
    lab.inputs, lab.perturbation = inputs, Perturbation(**perturbation)
    return lab.run(system)


def stock(*flags, gpus=(0,)):
    return System(name="stock", gpus=gpus, flags=("--micro-batch-size", "1", *flags))


def test_stock_on_one_gpu_takes_the_sum_of_its_computations(lab):
    found = run(lab, stock(), ROUND_NUMBERS)
    parameters = MODEL.num_parameters
    assert found.iteration_s == pytest.approx(BATCH * (LAYERS * 3 + 0.5 + 1.0) + parameters * 1e-9)
    memory = INPUTS.memory
    of_parameters = (memory.parameter_bytes, memory.gradient_bytes, memory.state_bytes)
    kept = LAYERS * memory.activation_bytes(1, "none") + memory.head_bytes(1)
    assert found.peak_bytes[0] == sum(count(parameters) for count in of_parameters) + kept


def test_stock_pipeline_takes_what_1f1b_takes(lab):
    """Stages of 2 layers: F = 2 and B = 4 s, and 0.5 s and 1 s more for embedding and head.

    The last stage (7 s a micro-batch) sets the beat; before and after it are the first forward
    (2.25 s) and the last backward (4.25 s) of the first stage.
    """
    flags = ("--pipeline-model-parallel-size", "2")
    found = run(lab, stock(*flags, gpus=(0, 1)), ROUND_NUMBERS)
    last = MODEL.num_layers // 2 * MODEL.layer_parameters() + MODEL.head_parameters()
    step_s = max(last, MODEL.num_parameters - last) * 1e-9
    assert found.iteration_s == pytest.approx(2.25 + BATCH * 7.0 + 4.25 + step_s)
    spell = SlowSpell(rank=1, factor=1.5, first_iteration=2, last_iteration=None)
    slow = run(lab, stock(*flags, gpus=(0, 1)), ROUND_NUMBERS, spells=(spell,))
    assert slow.iterations_s[0] == found.iterations_s[0]
    # It begins with the step of the first one.
    assert slow.iterations_s[1] == pytest.approx(2.25 + BATCH * 10.5 + 4.25 + step_s)


def test_stock_pipelines_as_the_simulator_says(lab):
    """Over a network, where it matters which transfers a rank starts together."""
    gpus = (2, 3, 4)
    grid = Grid(layers=(1, 2, 1), width=1, micro_batch_size=1, mode="none")
    inputs = on_ranks(INPUTS, gpus)
    system = System(name="stock", gpus=gpus, flags=flags_of_grid(inputs, grid))
    assert run(lab, system).iteration_s == pytest.approx(stock_s(inputs, grid), rel=0.0005)


def test_stock_interleaves_as_the_simulator_says(lab):
    """Two virtual stages of a layer on each of two GPUs: the bubble is half that of 1F1B."""
    grid = Grid(layers=(1,) * LAYERS, width=1, micro_batch_size=1, mode="none", virtual=2)
    plain = dataclasses.replace(grid, layers=(2, 2), virtual=1)
    inputs = on_ranks(ROUND_NUMBERS, (0, 1))
    system = System(name="stock", gpus=(0, 1), flags=flags_of_grid(inputs, grid))
    found = run(lab, system, ROUND_NUMBERS)
    assert found.iteration_s == pytest.approx(stock_s(inputs, grid), rel=0.002)
    # A forward of 1 s and a backward of 2 s less to fill and to drain.
    assert found.iteration_s == pytest.approx(stock_s(inputs, plain) - 3.0, abs=0.5)
    # Over a network it matters that a rank waits until an activation has left.
    gpus = (3, 4)
    inputs = on_ranks(INPUTS, gpus)
    system = System(name="stock", gpus=gpus, flags=flags_of_grid(inputs, grid))
    found = run(lab, system)
    assert found.iteration_s == pytest.approx(stock_s(inputs, grid), rel=0.0005)
    never_waits = dataclasses.replace(framework_of(grid), interleaves_as_megatron=False)
    plan = plan_of_grid(inputs, grid)
    assert simulate_plan(inputs, plan, framework=never_waits).iteration_s < 0.99 * found.iteration_s


def test_stock_takes_any_layers_in_each_virtual_stage(lab, monkeypatch):
    """A slower GPU first, which is on the later node; one layer is computed again."""
    model = dataclasses.replace(MODEL, num_layers=9)
    monkeypatch.setattr(lab, "training", dataclasses.replace(lab.training, model=model))
    inputs = make_inputs(
        load_cluster(CLUSTER), model, None, global_batch_size=BATCH, dtype="float16"
    )
    placed = Placement(nodes=((4,), (3,))).inputs(inputs)
    assert placed.kinds == ("V100-16", "A6000")
    grid = Grid(
        layers=(1, 3, 2, 3),
        width=1,
        micro_batch_size=1,
        mode="full",
        recomputed=1,
        virtual=2,
    )
    plan, flags = plan_of_grid(placed, grid), flags_of_grid(placed, grid)
    assert "Et|ttt|tt|tttL" in flags
    system = System(name="stock", gpus=(4, 3), flags=flags, stock_layout=plan)
    found = run(lab, system, inputs)
    predicted = simulate_plan(placed, plan, framework=framework_of(grid))
    assert found.iteration_s == pytest.approx(predicted.iteration_s, rel=0.0005)
    assert found.peak_bytes == pytest.approx(
        peaks_without(predicted, Category.BUFFERS, Category.FIXED), rel=0.02
    )


def stock_s(inputs, grid):
    """Stock's iteration as the simulator says."""
    plan = plan_of_grid(inputs, grid)
    return simulate_plan(inputs, plan, framework=framework_of(grid)).iteration_s


def simulated(plan, inputs, **changes):
    """The plan on `GPUS` of the cluster."""
    comm, kinds = _OnGpus(inputs.comm), [inputs.kinds[gpu] for gpu in GPUS]
    return simulate(plan, dataclasses.replace(inputs, comm=comm, kinds=kinds, **changes))


def without_messages(predicted):
    """What ranks hold at their peaks, but for messages, which emulated GPUs do not count."""
    return [rank.total_bytes - rank.at_peak_bytes[Category.BUFFERS] for rank in predicted.memory]


def test_stock_with_tensor_parallelism_takes_what_the_simulator_says(lab):
    """A pair of GPUs on each of the two nodes."""
    gpus = (2, 3, 4, 5)
    inputs = on_ranks(INPUTS, gpus)
    grid = Grid(layers=(2, 2), width=1, micro_batch_size=1, mode="none", tensor=2)
    plan, training = plan_of_grid(inputs, grid), lab.training
    system = System(name="stock", gpus=gpus, flags=flags_of_grid(inputs, grid), stock_layout=plan)
    lab.training = dataclasses.replace(training, shape=TinyShape.of(MODEL, [plan]))
    try:
        found = run(lab, system)
    finally:
        lab.training = training
    # Before it has learned anything; with twice as many rows of the vocabulary it is 0.7 more.
    assert found.losses[0] < math.log(VOCABULARY) + 0.2
    predicted = simulate_plan(inputs, plan, framework=framework_of(grid))
    assert found.iteration_s == pytest.approx(predicted.iteration_s, rel=0.001)
    assert found.peak_bytes == pytest.approx(
        peaks_without(predicted, Category.BUFFERS, Category.FIXED), rel=0.02
    )


@pytest.mark.parametrize(
    ("plan", "tolerance"),
    [
        pytest.param(UNEVEN, 0.002, id="1f1b"),
        pytest.param(
            changed(UNEVEN, FULL, activations=True, optimizer_state=True),
            0.002,
            id="inputs and state in the host",
        ),
        pytest.param(
            changed(UNEVEN, optimizer_state=True, optimizer_state_fraction=0.4),
            0.002,
            id="a part of the state in the host",
        ),
        pytest.param(split(UNEVEN), 0.002, id="1f1b, weight gradients apart"),
        # Two micro-batches at most are in flight: nothing would be away while another is computed.
        pytest.param(ENDING_WITH_TWO, 0.002, id="activations that need not leave"),
        pytest.param(MINISTAGES, 0.02, id="ministages"),
        pytest.param(
            changed(MINISTAGES, FULL, parameters=True, optimizer_state=True, activations=True),
            0.02,
            id="all in the host",
        ),
        pytest.param(
            changed(IDLE, parameters=True, gradients=True, activations=True),
            0.002,
            id="an idle replica, activations in the host",
        ),
    ],
)
def test_plans_take_what_the_simulator_says_and_lose_what_stock_loses(
    lab, stock_losses, plan, tolerance
):
    """The executed run against the simulated one: another program, the same prices.

    They part where a forward needs only its first layer's parameters to begin, and where ranks go
    on to the next step while others still gather.
    """
    found = run(lab, System(name="plan", gpus=GPUS, plan=plan))
    predicted = simulated(plan, INPUTS)
    assert found.iteration_s == pytest.approx(predicted.iteration_s, rel=tolerance)
    assert found.peak_bytes == pytest.approx(without_messages(predicted), rel=0.1)
    assert found.losses == pytest.approx(stock_losses, abs=2e-5)


@pytest.mark.parametrize(
    ("plan", "expected_s"),
    [
        # m (F + B + W) + (p - 1) (F + B - W), where each is 1 s of a layer and a sample.
        pytest.param(plan_of(*([((replica(at, 1, 8),), 1) for at in range(4)])), 27.0, id="1f1b"),
        pytest.param(
            changed(
                chunked_plan(
                    [(replica(0, 1, 8),), (replica(1, 1, 8),)], [(0, 1), (1, 1), (0, 1), (1, 1)]
                ),
                schedule=Schedule(name="interleaved"),
            ),
            49.0,
            id="interleaved",
        ),
    ],
)
def test_weight_gradients_apart_fill_the_bubble(lab, stock_losses, plan, expected_s):
    """To the clock of the emulated GPUs, and with the losses of stock; 33 and 51 s without."""
    inputs = dataclasses.replace(ROUND_NUMBERS, compute=FakeCompute())
    gpus = tuple(range(plan.world_size))
    found = run(lab, System(name="plan", gpus=gpus, plan=split(plan)), inputs)
    assert found.iteration_s == pytest.approx(expected_s, rel=1e-6)
    assert found.losses == pytest.approx(stock_losses, abs=2e-5)


def test_groups_take_what_computing_in_their_types_takes(lab):
    """fp32 on the A6000s takes longer than the job's float16; what crosses is in 16 bits."""
    plan = computing_in(UNEVEN, "fp32", "fp16")
    found = run(lab, System(name="plan", gpus=GPUS, plan=plan))
    alike, predicted = (simulated(plan, INPUTS, by_dtype=each) for each in ({}, INPUTS.by_dtype))
    assert predicted.iteration_s > 1.1 * alike.iteration_s
    assert found.iteration_s == pytest.approx(predicted.iteration_s, rel=0.002)
    assert found.peak_bytes == pytest.approx(predicted.peak_memory_bytes, rel=0.1)


ADAPTERS = Lora(rank=64, alpha=32, targets=("q", "v", "gate", "up", "down"))
WITH_ADAPTERS = make_inputs(
    load_cluster(CLUSTER),
    MODEL,
    None,
    global_batch_size=BATCH,
    dtype="float16",
    computing=dataclasses.replace(USUAL, lora=ADAPTERS),
)


@pytest.mark.parametrize(
    ("plan", "tolerance"),
    [
        pytest.param(UNEVEN, 0.002, id="1f1b"),
        pytest.param(
            changed(MINISTAGES, FULL, parameters=True, optimizer_state=True), 0.02, id="in the host"
        ),
    ],
)
def test_adapters_take_what_the_simulator_says(lab, plan, tolerance):
    """Of what is frozen there is no gradient, no state and no message; all of it is resident."""
    lora, inputs = ADAPTERS, WITH_ADAPTERS
    found = run(lab, System(name="plan", gpus=GPUS, plan=plan, flags=lora_flags(lora)), inputs)
    predicted, of_all = (simulated(plan, each) for each in (inputs, INPUTS))
    assert found.iteration_s == pytest.approx(predicted.iteration_s, rel=tolerance)
    assert predicted.iteration_s < 0.9 * of_all.iteration_s
    assert found.peak_bytes == pytest.approx(without_messages(predicted), rel=0.002)
    assert found.losses[-1] < found.losses[0]


EXPERTS = Experts(num_experts=8, per_token=2, ffn_hidden_size=MODEL.ffn_hidden_size // 8)


def with_experts(experts=EXPERTS, dense=()):
    return dataclasses.replace(MODEL, experts=experts, dense_layers=dense, linear_bias=False)


def inputs_of(model):
    return make_inputs(load_cluster(CLUSTER), model, None, global_batch_size=BATCH, dtype="float16")


@pytest.mark.parametrize(
    ("all_inputs", "flags", "experts"),
    [
        pytest.param(INPUTS, (), None, id="dense"),
        pytest.param(WITH_ADAPTERS, lora_flags(ADAPTERS), None, id="adapters"),
        pytest.param(inputs_of(with_experts(dense=(0, 2))), (), (6, 2), id="two kinds of layers"),
    ],
)
def test_tp_groups_take_what_the_simulator_says(lab, monkeypatch, all_inputs, flags, experts):
    """A TP group with uneven TP shards beside a rank of its own, and a rank that they send to.

    On PCIe, sums and gathers inside the TP groups are 6 % of the iteration.
    """
    columns = MODEL.ffn_hidden_size
    mlp_columns = columns * 3 // 4, columns // 4
    tp_shards = TpShards(kv_groups=(20, 12), mlp_columns=mlp_columns, experts=experts)
    unlike = (tp_replica((0, 1), 2, 3, 2.0, tp_shards), replica(2, 1, 2))
    plan = plan_of((unlike, 2), ((replica(3, 4, 2),), 2))
    shape = TinyShape.of(MODEL, [plan])
    monkeypatch.setattr(lab, "training", dataclasses.replace(lab.training, shape=shape))
    system = System(name="plan", gpus=(0, 1, 2, 3), plan=plan, flags=flags)
    found = run(lab, system, all_inputs)
    inputs = dataclasses.replace(all_inputs, kinds=INPUTS.kinds[:4], gpus=None)
    predicted = simulate_plan(inputs, plan)
    assert found.iteration_s == pytest.approx(predicted.iteration_s, rel=0.01)
    expected = peaks_without(predicted, Category.BUFFERS)
    assert found.peak_bytes == pytest.approx(expected, rel=0.01)


def test_between_the_factors_of_adapters_their_rank_crosses():
    """Three targets' A x of two samples, on the whole sequence."""
    memory = WITH_ADAPTERS.memory
    tp_groups = SimpleNamespace(
        memories=(memory,),
        ranks=((0, 1),),
        measured=(frozenset(),),
        adapter_share=ADAPTERS.rank / MODEL.hidden_size,
        sharing=(None,),
    )
    costs = (SimpleNamespace(memory=memory),)
    job = SimpleNamespace(
        **{"costs": costs, "tp_groups": tp_groups, "sequence_length": 32, "hidden_size": 64},
        costs_of_layer=lambda rank, _layer: costs[rank],
    )
    sizes = ModelSizes(job, 0)
    found = sizes.inside_bytes(torch.empty(32, 2, 3 * LORA_RANK))
    expected = 2 * 3 * MODEL.seq_length * ADAPTERS.rank * 2
    assert found == pytest.approx(expected, rel=0.002)  # of whole elements of the tiny one
    assert sizes.inside_bytes(torch.empty(32, 2, 64)) == memory.boundary_bytes(2)


def test_a_tied_table_is_as_large_on_the_first_stage_as_on_the_last(lab, monkeypatch):
    """Stock sums its gradient over the two, which have other parameters beside it."""
    model = dataclasses.replace(MODEL, tied_embeddings=True)
    monkeypatch.setattr(lab, "training", dataclasses.replace(lab.training, model=model))
    tied = make_inputs(load_cluster(CLUSTER), model, None, global_batch_size=BATCH, dtype="float16")
    found = run(lab, stock("--pipeline-model-parallel-size", "2", gpus=(0, 1)), tied)
    layers = 2 * model.layer_parameters()
    on_ranks = (model.embedding_parameters() + layers, model.table_parameters() + layers)
    for peak, parameters in zip(found.peak_bytes, on_ranks, strict=True):
        static = parameters * (2 + 4 + 12)
        assert static < peak < static + 3 * 2**30


class _OnGpus:
    """The cluster's links between the ranks of a job."""

    def __init__(self, comm):
        self.comm = comm

    def __getattr__(self, name):
        call = getattr(self.comm, name)
        if name in ("transfer_s", "shared_links"):
            return lambda source, target, *more: call(GPUS[source], GPUS[target], *more)
        if name == "host_link_bytes_per_s":
            return lambda rank: call(GPUS[rank])
        return lambda ranks, *more: call(tuple(GPUS[rank] for rank in ranks), *more)


def test_a_gpu_that_is_too_small_runs_out_of_memory(lab):
    state = UNEVEN.groups[0].replicas[0]
    assert state.shard_weight == 3.0  # rank 0 owns most
    few = tuple(4 * 2**30 if gpu == GPUS[0] else 48 * 2**30 for gpu in range(8))
    small = dataclasses.replace(INPUTS, capacities_bytes=few)
    found = run(lab, System(name="plan", gpus=GPUS, plan=UNEVEN), small)
    assert found.iterations_s == ()
    assert found.out_of_memory is not None
    assert found.out_of_memory.startswith("CUDA out of memory. The emulated GPU of rank 0 would")
    beside = fixed_bytes(UNEVEN, [INPUTS.gpus[INPUTS.kinds[gpu]] for gpu in GPUS])[0]
    assert found.out_of_memory.endswith(f"it has {4 - beside / 2**30:.2f} GiB for tensors.")


def test_ranks_start_fast(lab):
    """Forked ranks take Megatron's arguments from their parent, and fork what helps them save."""
    entry, directory = "tests.megatron.prepared_entry", lab.directory / "prepared"
    directory.mkdir()
    job = RankJob(
        name="x", entry=entry, arguments=(), world_size=2, directory=directory, limit_s=60
    )
    lab.server.run(job).check()


LAB = """
name: lab
nodes:
  - {name: new, gpus: 1 x A6000, nics: 100 Gb/s}
  - {name: old, gpus: 2 x V100-16, nics: 100 Gb/s}
"""
MODEL_FLAGS = (
    "--num-layers 4 --hidden-size 1024 --num-attention-heads 16 --seq-length 512 --vocab-size "
    "32000 --position-embedding-type rope --untie-embeddings-and-output-weights --fp16"
)


def test_the_commands(tmp_path, monkeypatch):
    """Compare on a lab whose rank 1 is slower than the planner believes; then emulate its plan."""
    monkeypatch.chdir(tmp_path)
    Path("cluster.yaml").write_text(LAB)
    common = ("--cluster", "cluster.yaml", "--model", MODEL_FLAGS, "--iterations", "2")
    slow = ("--slow", "1=1.5", "--json")
    compare = ("compare", *common, "--global-batch-size", "6", "--quick", "--out", "made", *slow)
    even, stock, ours = json.loads(_run(compare))["rows"]
    assert (even["system"], stock["system"]) == ("stock, best even layout", "stock, best layout")
    for row in (even, stock):
        assert row["final_loss"] == pytest.approx(ours["final_loss"], abs=2e-5)
    assert stock["iteration_s"] > stock["predicted_iteration_s"]
    assert stock["speedup_vs_stock"] == 1
    plan = plan_of(*(((replica(rank, 1, 6),), layers) for rank, layers in enumerate((2, 1, 1))))
    save_plan(plan, "plan.json")
    slow = (*slow, "--slow", "new/nic0:out=50")
    answer = json.loads(_run(("emulate", "plan.json", *common, *slow)))
    assert len(answer["losses"]) == len(answer["iterations_s"]) == 2
    assert answer["predicted_iteration_s"] < answer["iteration_s"]


def _run(arguments):
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.output
    return result.stdout
