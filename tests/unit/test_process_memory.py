"""What a process takes beside tensors, against sums by hand."""

import dataclasses
import json

import pytest

from tests.unit.cli_samples import runner_in
from tests.unit.profile_samples import good as good_profile
from tests.unit.test_schedules import even_plan
from zorse_megatron.costs.process_memory import (
    communicator_bytes,
    crowding,
    fixed_bytes,
    fixed_items,
    most_bytes,
    process_items,
)
from zorse_megatron.gpus.known_gpus import GPU_KINDS
from zorse_megatron.inputs.cluster_yaml import parse_cluster
from zorse_megatron.inputs.model import MODELS
from zorse_megatron.inputs.profile import parse_profile
from zorse_megatron.planner.inputs.search_inputs import make_inputs
from zorse_megatron.schedule.communicators import Communicator

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
    assert crowding(plan, [small] * 24) is not None
    assert crowding(plan, [GPU_KINDS["T4"]] * 24) is None
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
    spared = [
        most_bytes(gpu) - most_bytes(inputs.gpus[kind])
        for gpu, kind in zip(plain, inputs.kinds, strict=True)
    ]
    assert spared == [184 * MIB, 184 * MIB, 0]


def test_simulated_peaks_have_them(tmp_path, monkeypatch):
    run = runner_in(tmp_path, monkeypatch)
    command = ("explain", "plan.json", "--cluster", "cluster.yaml", "--model", "model.json")
    ranks = json.loads(run(*command, "--json").stdout)["ranks"]
    for rank in ranks:
        assert rank["at_peak_bytes"]["fixed"] > CONTEXT + WORKSPACES
        assert sum(rank["at_peak_bytes"].values()) == rank["peak_memory_bytes"]
    said = run(*command).stdout
    assert "CUDA context 484 MiB, cuBLAS workspaces 12.1 MiB" in " ".join(said.split())
