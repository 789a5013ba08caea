"""A model that fits only with parameters and gradients in the host trains under the planner's plan,
in the time and memory that the simulator says."""

import dataclasses
from functools import partial
from unittest.mock import patch

import pytest

from tests.megatron.test_emulation import BATCH, CLUSTER, GPUS, client_of_tests
from zorse_megatron.emulate import emulator as rank_server
from zorse_megatron.emulate.emulator import System, emulator
from zorse_megatron.emulate.tiny_model import TinyTraining
from zorse_megatron.inputs.cluster_yaml import load_cluster
from zorse_megatron.inputs.model import MODELS
from zorse_megatron.plan.memory_settings import (
    ranks_that_offload,
)
from zorse_megatron.planner.closed_form import stage_settings
from zorse_megatron.planner.closed_form.stage_memory import host_settings
from zorse_megatron.planner.find_plan import find_plan
from zorse_megatron.planner.inputs.search_inputs import SearchSpace, make_inputs, on_ranks
from zorse_megatron.planner.outcome import NoPlanError
from zorse_megatron.simulate.memory_ledger import Category

GIB = 2**30
MODEL = dataclasses.replace(MODELS["llama-3b"], num_layers=16, vocab_size=4096)
EACH_BYTES = int(4.0 * GIB)


def small_gpus():
    """Three GPUs of a lab with less memory than gradients alone take."""
    lab = make_inputs(load_cluster(CLUSTER), MODEL, None, global_batch_size=BATCH, dtype="float16")
    few = tuple(EACH_BYTES if gpu in GPUS else 0 for gpu in range(len(lab.kinds)))
    return dataclasses.replace(lab, capacities_bytes=few, space=SearchSpace(max_tensor_parallel=1))


def without(name, stage):
    return (each for each in host_settings(stage) if not getattr(each, name))


@pytest.mark.slow
def test_a_model_that_needs_all_in_the_host_takes_what_the_simulator_says():
    inputs = small_gpus()
    outcome = find_plan(on_ranks(inputs, GPUS))
    assert ranks_that_offload(outcome.plan, "parameters") == {0, 1, 2}
    assert ranks_that_offload(outcome.plan, "gradients") == {0, 1, 2}
    for name in ("offload_parameters", "offload_gradients"):
        with (
            patch.object(stage_settings, "host_settings", partial(without, name)),
            pytest.raises(NoPlanError, match="no plan fits in memory"),
        ):
            find_plan(on_ranks(small_gpus(), GPUS))  # inputs remember what was found with them
    training = TinyTraining(model=MODEL, global_batch_size=BATCH, iterations=2)
    with (
        patch.object(rank_server, "ForkClient", client_of_tests),
        emulator(inputs, training) as lab,
    ):
        found = lab.run(System(name="plan", gpus=GPUS, plan=outcome.plan))
    assert found.out_of_memory is None
    assert found.iteration_s == pytest.approx(outcome.iteration_s, rel=0.02)
    # Emulated GPUs count neither messages nor what is beside tensors.
    expected = [
        rank.total_bytes - rank.at_peak_bytes[Category.BUFFERS] - rank.at_peak_bytes[Category.FIXED]
        for rank in outcome.simulation.memory
    ]
    assert found.peak_bytes == pytest.approx(expected, rel=0.1)
