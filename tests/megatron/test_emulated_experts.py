"""Models with experts train on emulated GPUs, gathered and shared: their times and memory."""

import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch

from scripts.validation.peaks import peaks_without
from tests.megatron import test_emulation
from tests.megatron.plans import expert_replica, plan_of, replica, split
from tests.megatron.test_emulation import (
    EXPERTS,
    FULL,
    GPUS,
    INPUTS,
    LAYERS,
    MINISTAGES,
    MODEL,
    UNEVEN,
    changed,
    inputs_of,
    run,
    simulated,
    stock,
    with_experts,
    without_messages,
)
from zorse_megatron.costs.shared_experts import ExpertLoad
from zorse_megatron.emulate.emulator import System, tp_groups_of_job
from zorse_megatron.emulate.on_ranks.model_sizes import ModelSizes
from zorse_megatron.emulate.tiny_model import TinyShape, TinyTraining
from zorse_megatron.inputs.cluster_yaml import parse_cluster
from zorse_megatron.inputs.model import MODELS, Experts
from zorse_megatron.plan.plan import Recompute
from zorse_megatron.planner.inputs.search_inputs import make_inputs, with_load
from zorse_megatron.planner.simulate_plan import simulate_plan
from zorse_megatron.simulate.memory_ledger import Category

# Fixtures.
_one_server, lab = test_emulation._one_server, test_emulation.lab

WITH_EXPERTS = inputs_of(with_experts())
# The layers that are not dense have twice their parameters.
DENSE_AMONG_EXPERTS = inputs_of(with_experts(dataclasses.replace(EXPERTS, num_experts=16), (0, 2)))


@pytest.mark.parametrize(
    ("plan", "all_inputs"),
    [
        pytest.param(UNEVEN, WITH_EXPERTS, id="1f1b"),
        pytest.param(changed(MINISTAGES, FULL, parameters=True), WITH_EXPERTS, id="in the host"),
        pytest.param(split(UNEVEN), DENSE_AMONG_EXPERTS, id="dense layers, 1f1b"),
        pytest.param(
            changed(MINISTAGES, Recompute(mode="full", num_layers=1)),
            DENSE_AMONG_EXPERTS,
            id="dense layers, ministages",
        ),
    ],
)
def test_experts_take_what_the_simulator_says(lab, monkeypatch, plan, all_inputs):
    """The tiny model has none, but all that is emulated is of layers with them."""
    # The second iteration is longer: ranks tell each other once what losses there are.
    monkeypatch.setattr(lab, "training", dataclasses.replace(lab.training, iterations=3))
    found = run(lab, System(name="plan", gpus=GPUS, plan=plan), all_inputs)
    predicted = simulated(plan, all_inputs)
    assert found.iteration_s == pytest.approx(predicted.iteration_s, rel=0.002)
    assert found.peak_bytes == pytest.approx(without_messages(predicted), rel=0.002)


# One rank has no experts, another no samples.
SHARED = plan_of(
    ((expert_replica((0, 1), (6, 2), (2, 1), 2, weight=3.0), replica(2, 1, 2)), 2),
    ((expert_replica((3, 4, 5), (3, 0, 5), (2, 2, 0), 2, 2.0, 1.0, 3.0),), 2),
)
OVERLAPPED = plan_of(
    (
        (expert_replica((0, 1), (6, 2), (4, 2), 1, weight=3.0, overlap=True), replica(2, 1, 2)),
        2,
    ),
    ((expert_replica((3, 4, 5), (3, 0, 5), (2, 2, 0), 2, 2.0, 1.0, 3.0, overlap=True),), 2),
)
# The ranks of the first group come to their backwards one after the other.
APART = plan_of(
    ((expert_replica((0, 1), (6, 2), (4, 2), 1, 1.0, 0.0, overlap=True), replica(2, 2, 1, 0.0)), 2),
    ((expert_replica((3, 4, 5), (3, 0, 5), (2, 2, 0), 2, 1.0, 0.0, 0.0, overlap=True),), 2),
)
LOAD = ExpertLoad(shares=(0.05, 0.05, 0.3, 0.2, 0.2, 0.1, 0.1, 0.0))


@pytest.mark.parametrize(
    ("plan", "model", "load"),
    [
        pytest.param(SHARED, with_experts(), LOAD, id="1f1b, uneven routing"),
        pytest.param(split(SHARED), with_experts(), None, id="weight gradients apart"),
        pytest.param(OVERLAPPED, with_experts(), LOAD, id="overlapped"),
        pytest.param(
            split(OVERLAPPED),
            with_experts(dense=(1, 2)),
            None,
            id="dense layers, overlapped, apart",
        ),
        pytest.param(
            APART, with_experts(dense=(1,)), None, id="dense layers at the end, overlapped"
        ),
        pytest.param(
            changed(SHARED, FULL),
            with_experts(dataclasses.replace(EXPERTS, shared_ffn_hidden_size=4096), (0, 1)),
            None,
            id="only dense in a group, shared experts, recomputed",
        ),
    ],
)
def test_ranks_that_share_experts_take_what_the_simulator_says(lab, monkeypatch, plan, model, load):
    """Exchanges are 7 to 10 % of the iteration."""
    all_inputs = inputs_of(model) if load is None else with_load(inputs_of(model), load)
    shape = TinyShape.of(model, [plan])
    monkeypatch.setattr(lab, "training", dataclasses.replace(lab.training, shape=shape))
    found = run(lab, System(name="plan", gpus=tuple(range(6)), plan=plan), all_inputs)
    assert found.losses == pytest.approx(run(lab, stock(), all_inputs).losses, abs=2e-5)
    inputs = dataclasses.replace(all_inputs, kinds=INPUTS.kinds[:6], gpus=None)
    predicted = simulate_plan(inputs, plan)
    assert found.iteration_s == pytest.approx(predicted.iteration_s, rel=0.0005)
    expected = peaks_without(predicted, Category.BUFFERS)
    assert found.peak_bytes == pytest.approx(expected, rel=0.002)  # shards are rounded


# Two nodes of one GPU.
FEW_LINKS = b"nodes: [{name: a, count: 2, gpus: 1 x A100-40, nics: 25 Gb/s}]"
SMALL_EXPERTS = dataclasses.replace(
    MODELS["olmoe-1b-7b"],
    num_layers=LAYERS,
    seq_length=1024,
    experts=Experts(num_experts=16, per_token=2, ffn_hidden_size=768),
)


@pytest.mark.parametrize("samples", [4, 32])
def test_sharing_experts_pays_below_so_many_tokens_and_gathering_them_above(
    lab, monkeypatch, samples
):
    """They take as long at 3 E f / k tokens of a GPU and step: 18 samples."""
    batch, size = 2 * samples, min(samples, 8)
    inputs = make_inputs(
        parse_cluster(FEW_LINKS), SMALL_EXPERTS, None, global_batch_size=batch, dtype="bfloat16"
    )
    count = samples // size
    gathered = plan_of(((replica(0, size, count), replica(1, size, count)), LAYERS))
    shared = plan_of(((expert_replica((0, 1), (8, 8), (size, size), count),), LAYERS))
    taken_s, losses = [], []
    for plan in (gathered, shared):
        shape = TinyShape.of(SMALL_EXPERTS, [shared])
        training = TinyTraining(
            model=SMALL_EXPERTS, global_batch_size=batch, iterations=3, shape=shape
        )
        monkeypatch.setattr(lab, "training", training)
        found = run(lab, System(name="plan", gpus=(0, 1), plan=plan), inputs)
        predicted = simulate_plan(inputs, plan)
        assert found.iteration_s == pytest.approx(predicted.iteration_s, rel=1e-5)
        taken_s.append(found.iteration_s)
        losses.append(found.losses)
    assert losses[0] == pytest.approx(losses[1], abs=2e-5)
    assert (taken_s[1] < taken_s[0]) == (samples < 18)


def test_tokens_cost_what_they_cost_where_routing_is_even():
    """Wherever those of the tiny model go; here two of three samples are on the first rank."""
    shared = expert_replica((0, 1), (6, 2), (2, 1), 1)
    tp_groups = tp_groups_of_job(WITH_EXPERTS, plan_of(((shared,), LAYERS)), INPUTS.kinds[:2])
    costs = (SimpleNamespace(memory=WITH_EXPERTS.memory),) * 2
    job = SimpleNamespace(
        **{"costs": costs, "tp_groups": tp_groups, "sequence_length": 32, "hidden_size": 64},
        costs_of_layer=lambda rank, _layer: costs[rank],
    )
    sizes = ModelSizes(job, 1)
    tokens, routes = torch.empty(5, 64), torch.empty(96, 2)
    passing = [1 - math.comb(8 - held, 2) / math.comb(8, 2) for held in (6, 2)]
    each = MODEL.seq_length * MODEL.hidden_size * 2
    there = sizes.token_messages(tokens)
    assert there == {(0, 1): round(2 * each * passing[1]), (1, 0): round(each * passing[0])}
    told = {(0, 1): 2 * MODEL.seq_length * 2 * 4, (1, 0): MODEL.seq_length * 2 * 4}
    assert sizes.token_messages(routes) == told
    sizes.exchanges.returns = True
    assert sizes.token_messages(tokens) == {(1, 0): there[0, 1], (0, 1): there[1, 0]}
    assert sizes.token_messages(routes) == {(1, 0): told[0, 1], (0, 1): told[1, 0]}
