"""What `zorse emulate` and `compare` hand to the emulator. See tests/megatron for runs."""

import contextlib
import dataclasses
import json

import pytest

from tests.unit.cli_samples import FLAGS, lab_plan
from zorse_megatron.cli.console import refuse
from zorse_megatron.cli.options import DEFAULT_MARGIN
from zorse_megatron.cli.workload import workload_of
from zorse_megatron.cli.workload_costs import costs_of_workload
from zorse_megatron.emulate.tiny_model import TinyTraining, training_flags
from zorse_megatron.errors import Problem
from zorse_megatron.flags.command import read_command
from zorse_megatron.flags.model_in_flags import computing_from_flags
from zorse_megatron.inputs.cluster_yaml import load_cluster
from zorse_megatron.inputs.model import MODELS, JobRecompute
from zorse_megatron.plan.plan_file import parse_plan

BASE = ("emulate", "plan.json", "--cluster", "cluster.yaml")
ENOUGH = [Problem(where="a", found="b", expected="c", remedy="d")]


@pytest.fixture
def begun(monkeypatch):
    """What would be emulated: (what trains, options, system)."""
    found = []

    class Emulator:
        def __init__(self, *told):
            self.told = told

        def run(self, system):
            found.append((*self.told, system))
            refuse(ENOUGH)

    @contextlib.contextmanager
    def emulator(inputs, training, **options):
        yield Emulator(inputs, training, options)

    monkeypatch.setattr("zorse_megatron.emulate.emulator.emulator", emulator)
    return found


def test_stock_trains_with_the_flags_of_the_layout(run, begun, tmp_path):
    """On the nodes and GPUs in its order; stock recomputes by its own flags."""
    plan = lab_plan()
    for chunk, number in zip(plan["chunks"], (1, 0), strict=True):
        chunk["group"] = number
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    flags = (*FLAGS, "--micro-batch-size", "2")
    run(*BASE, "--", *flags, "--recompute-activations")
    run(*BASE, "--stock", "--", *flags)
    (_, training, _, ours), (_, same, _, stock) = begun
    assert training.recompute == JobRecompute(mode="selective") and ours.plan is not None
    assert same.recompute is None and stock.plan is None
    assert ours.gpus == tuple(range(8)) and stock.gpus == (4, 5, 6, 7, 0, 1, 2, 3)
    words = list(stock.flags)
    assert words[words.index("--pipeline-model-parallel-layout") + 1] == "Et*5|tttL"


def test_links_that_an_error_names_are_there(run, begun):
    model = ("--model", "model.json")
    told = run(*BASE, *model, "--slow", "new/nic0:uot=2").output
    names = told.split("such as ")[1].split(". ")[0].split(", ")
    assert names[0] == "new/nic0:out" and len(names) == 6 and not begun
    for name in names:
        run(*BASE, *model, "--slow", f"{name}=2", "--slow", "3=2@2-3")
    factors = [each[2]["perturbation"].link_factors for each in begun]
    assert factors == [{name: 0.5} for name in names]
    (spell,) = begun[0][2]["perturbation"].spells
    assert dataclasses.astuple(spell) == (3, 2.0, 2, 3)


@pytest.mark.parametrize(
    "flags",
    [
        ["--hidden-dropout", "0.1"],
        ["--attention-backend", "unfused"],
        ["--transformer-impl", "local"],
        ["--accumulate-allreduce-grads-in-fp32"],
    ],
)
def test_compare_prices_as_the_command_computes(run, monkeypatch, flags):
    """What a layer and its gradients take, and how long, as `zorse plan` has it."""
    seen = []

    def nobody(inputs, *_more):
        seen.append(inputs)
        refuse(ENOUGH)

    monkeypatch.setattr("zorse_megatron.emulate.compare.compared_systems", nobody)
    usual = [*FLAGS, "--hidden-dropout", "0", "--attention-dropout", "0"]
    told = [usual, [*usual, *flags]]
    for each in told:
        run("compare", "--cluster", "cluster.yaml", "--out", "there", "--", *each)
    assert len(seen) == 2
    cluster = load_cluster("cluster.yaml")
    for inputs, each in zip(seen, told, strict=True):
        workload = workload_of(model=None, flags=each)
        planned = costs_of_workload(
            cluster, workload, [], global_batch_size=16, margin=DEFAULT_MARGIN
        ).inputs
        assert _prices(inputs) == _prices(planned)
    assert _prices(seen[0]) != _prices(seen[1])


def _prices(inputs):
    times = [inputs.compute.layer(kind, 2) for kind in ("A6000", "V100-16")]
    return times, inputs.memory.activation_bytes(2, "none"), inputs.memory.gradient_bytes(1000)


@pytest.mark.parametrize(
    "recompute",
    [
        None,
        JobRecompute(mode="selective"),
        JobRecompute(mode="full", num_layers=3),
        JobRecompute(mode="full", layers_at_once=2),
        JobRecompute(mode="full"),
    ],
)
def test_the_tiny_model_recomputes_as_the_real_one(recompute):
    training = TinyTraining(
        model=MODELS["llama-1b"], global_batch_size=8, iterations=2, recompute=recompute
    )
    flags = [*training_flags(training, []), "--vocab-size", "256"]
    assert computing_from_flags(read_command(flags).args).recompute == recompute


def test_a_well_known_model_has_the_plans_sequence_length():
    plan = parse_plan(json.dumps(lab_plan()).encode())
    found = workload_of(model="llama-3b", flags=None, plan=plan).model
    assert found == dataclasses.replace(MODELS["llama-3b"], seq_length=plan.model.seq_length)
    assert plan.model.seq_length != MODELS["llama-3b"].seq_length
