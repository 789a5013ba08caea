"""Figures of GPUs: as printed, as documented, of single slow GPUs, and too good to be true."""

import copy
import dataclasses
import json
from pathlib import Path

import pytest

from tests.unit.cli_samples import EXAMPLES, WORKLOAD, runner_in
from tests.unit.profile_samples import good
from zorse_megatron.cli.simulated import simulated
from zorse_megatron.cli.workload import workload_of
from zorse_megatron.cli.workload_costs import costs_on
from zorse_megatron.costs.analytic_compute import shares_of
from zorse_megatron.costs.measured_curves import unlikely_times
from zorse_megatron.costs.own_speeds import (
    GpuSpeed,
    OwnSpeeds,
    alike_factors,
    equal_kinds,
    with_own_speeds,
)
from zorse_megatron.gpus.known_gpus import GPU_KINDS
from zorse_megatron.inputs.cluster_yaml import dump_cluster, load_cluster, parse_cluster
from zorse_megatron.inputs.profile import load_profile, parse_profile, save_profile
from zorse_megatron.plan.plan_file import load_plan
from zorse_megatron.simulate.assumptions import Perturbation

# As data sheets print them: GB, GB/s, TFLOP/s of float32, of tf32 and of 16 bits; the last two
# divided by what sparsity doubles. The copies of the sheets that were compared, by kind:
# A100, A30, A10, A40, L40, L40S, H100 PCIe, H200: NVIDIA's table in TensorRT-LLM, which cites its
# data sheets, and resellers' copies of A40, A10, L40 and L40S; V100 and float32 of the H100 PCIe:
# the tables of MosaicML's Composer, which cite them; B200: a copy of the HGX B200's; RTX 6000 Ada:
# one of its own, which prints fp8 alone, with sparsity; RTX 5090: torchao's, which cites the white
# paper; float32 of the A30: a sixteenth of 16 bits, as the A100's.
PRINTED = {
    "B200": (180, 7700, 75, 2200 / 2, 4500 / 2),
    "H200": (141, 4800, 67, 989 / 2, 1979 / 2),
    "H100-PCIE-80": (80, 2000, 51, 756 / 2, 1513 / 2),
    "A100-PCIE-80": (80, 1935, 19.5, 156, 312),
    "A100-PCIE-40": (40, 1555, 19.5, 156, 312),
    "A40": (48, 696, 37.4, 74.8, 149.7),
    "A30": (24, 933, 10.3, 82, 165),
    "A10": (24, 600, 31.2, 62.5, 125),
    "L40S": (48, 864, 91.6, 183, 362.05),
    "L40": (48, 864, 90.5, 90.5, 181.05),
    "V100-PCIE-32": (32, 900, 14, None, 112),
    "V100-PCIE-16": (16, 900, 14, None, 112),
    "RTX6000-Ada": (48, 960, 91.1, 1457 / 8, 1457 / 4),
    "RTX5090": (32, 1792, 104.8, 209.5 / 2, 209.5),
    "H20": (96, 4000, None, 74, 147),
}

# Streaming multiprocessors, clock of the 16-bit rate in MHz, and their operations a cycle: two for
# each multiply-add of the cores (float32) and of the tensor cores (16 bits, with sums in float32).
# NVIDIA's white papers on Volta, Turing, Ampere, Ada, Hopper and Blackwell, and its boost clocks.
# Cards that `PRINTED` lacks were compared with this alone: no copy of their sheets was at hand.
UNITS = {
    "H200": (132, 1830, 256, 4096),
    "H100-PCIE-80": (114, 1620, 256, 4096),
    "A100-PCIE-80": (108, 1410, 128, 2048),
    "A40": (84, 1740, 256, 1024),
    "A30": (56, 1440, 128, 2048),
    "A10": (72, 1695, 256, 1024),
    "L40S": (142, 2490, 256, 1024),
    "L40": (142, 2490, 256, 512),
    "V100-PCIE-16": (80, 1380, 128, 1024),
    "RTX6000-Ada": (142, 2505, 256, 1024),
    "RTX5090": (170, 2407, 256, 512),
    "RTX4090": (128, 2520, 256, 512),
    "RTX5080": (84, 2617, 256, 512),
    "RTX5070Ti": (70, 2452, 256, 512),
    "RTX5070": (48, 2512, 256, 512),
    "RTX4080Super": (80, 2550, 256, 512),
    "RTX4080": (76, 2505, 256, 512),
    "RTX4070TiSuper": (66, 2610, 256, 512),
    "RTX4070Ti": (60, 2610, 256, 512),
    "RTX4070Super": (56, 2475, 256, 512),
    "RTX4070": (46, 2475, 256, 512),
    "RTX4060Ti-16": (34, 2535, 256, 512),
    "RTX4060Ti-8": (34, 2535, 256, 512),
    "RTX4060": (24, 2460, 256, 512),
    "RTX3090": (82, 1695, 256, 512),
    "RTX3080Ti": (80, 1665, 256, 512),
    "RTX3080": (68, 1710, 256, 512),
    "RTX3070Ti": (48, 1770, 256, 512),
    "RTX3070": (46, 1725, 256, 512),
    "RTX3060Ti": (38, 1665, 256, 512),
    "RTX3060": (28, 1777, 256, 512),
    "RTX2080Ti": (68, 1545, 128, 512),
    "A6000": (84, 1800, 256, 1024),
    "A5000": (64, 1695, 256, 1024),
    "A4500": (56, 1650, 256, 1024),
    "A4000": (48, 1560, 256, 1024),
    "A2000-12": (26, 1200, 256, 1024),
    "A2000-6": (26, 1200, 256, 1024),
    "RTX5000-Ada": (100, 2550, 256, 1024),
    "RTX4500-Ada": (60, 2580, 256, 1024),
    "RTX4000-Ada": (48, 2175, 256, 1024),
    "RTX2000-Ada": (22, 2130, 256, 1024),
    "T4": (40, 1590, 128, 1024),
}


@pytest.mark.parametrize("name", PRINTED)
def test_figures_are_as_printed(name):
    kind = GPU_KINDS[name]
    memory_gb, gb_per_s, fp32, tf32, fp16 = PRINTED[name]
    assert kind.advertised_gb == memory_gb
    assert kind.memory_bytes_per_s == gb_per_s * 1e9
    # Halves and quarters of what is printed rounded; 2.2 PFLOP/s of the B200 is rounded most.
    tolerance = 0.025 if name == "B200" else 1e-3
    assert kind.peak.of("float16") == pytest.approx(fp16 * 1e12, rel=1e-3)
    assert kind.peak.tf32_flops_per_s == (tf32 and pytest.approx(tf32 * 1e12, rel=tolerance))
    assert ("float32" in kind.unconfirmed) == (fp32 is None)
    if fp32 is not None:
        assert kind.peak.of("float32") == fp32 * 1e12


@pytest.mark.parametrize("name", UNITS)
def test_rates_are_what_the_units_can_do(name):
    multiprocessors, mhz, float32, sixteen_bit = UNITS[name]
    cycles_per_s, peak = multiprocessors * mhz * 1e6, GPU_KINDS[name].peak
    assert GPU_KINDS[name].multiprocessors == multiprocessors
    assert peak.of("float16") == pytest.approx(cycles_per_s * sixteen_bit, rel=0.012)
    # Hopper's cores run faster than its tensor cores; what runs at one clock has one ratio.
    rel = 0.085 if name.startswith("H") else 0.015
    assert peak.of("float32") == pytest.approx(cycles_per_s * float32, rel=rel)


def test_tf32_is_half_of_sixteen_bits():
    tensor = [kind for kind in GPU_KINDS.values() if kind.peak.tf32_flops_per_s]
    assert len(tensor) > 10
    for kind in tensor:
        assert kind.peak.of("tf32") == pytest.approx(kind.peak.of("float16") / 2, rel=0.012)


# Transfers a second of each pin of the memory, in GT/s, and pins: NVIDIA's pages of the cards.
MEMORY = {
    "RTX5080": (30, 256),
    "RTX5070Ti": (28, 256),
    "RTX5070": (28, 192),
    "RTX4080Super": (23, 256),
    "RTX4080": (22.4, 256),
    "RTX4070TiSuper": (21, 256),
    "RTX4070Ti": (21, 192),
    "RTX4070Super": (21, 192),
    "RTX4070": (21, 192),
    "RTX4060Ti-16": (18, 128),
    "RTX4060Ti-8": (18, 128),
    "RTX4060": (17, 128),
    "RTX3080Ti": (19, 384),
    "RTX3070Ti": (19, 256),
    "RTX3070": (14, 256),
    "RTX3060Ti": (14, 256),
    "RTX3060": (15, 192),
    "RTX2080Ti": (14, 352),
    "A5000": (16, 384),
    "A4500": (16, 320),
    "A4000": (14, 256),
    "A2000-12": (12, 192),
    "A2000-6": (12, 192),
    "RTX5000-Ada": (18, 256),
    "RTX4500-Ada": (18, 192),
    "RTX4000-Ada": (18, 160),
    "RTX2000-Ada": (14, 128),
}


@pytest.mark.parametrize("name", MEMORY)
def test_memory_bandwidth_is_what_the_pins_can_do(name):
    transfers, pins = MEMORY[name]
    expected = transfers * 1e9 * pins / 8
    assert GPU_KINDS[name].memory_bytes_per_s == pytest.approx(expected, rel=2e-3)


@pytest.mark.parametrize("board", ["A100-80", "A100-40"])
def test_a_card_computes_as_the_board_does(board):
    card = GPU_KINDS[board.replace("A100", "A100-PCIE")]
    assert card.peak == GPU_KINDS[board].peak
    for dtype in ("float16", "float32"):
        fitted, _ = shares_of(equal_kinds(board, GPU_KINDS), dtype)
        assert shares_of(equal_kinds(card.name, GPU_KINDS), dtype)[0] == fitted
    assert dataclasses.replace(card, name=board) != GPU_KINDS[board]


# The span of `total_memory` in GiB, as out-of-memory messages of different drivers have it.
TOTAL_CAPACITY = {
    "T4": (14.56, 14.75),
    "V100-16": (15.75, 15.78),
    "V100-32": (31.74, 31.75),
    "A10G": (22.05, 22.20),
    "L4": (22.03, 22.17),
    "A100-40": (39.38, 39.59),
    "A100-80": (79.15, 79.35),
    "H100-80": (79.10, 79.33),
}


@pytest.mark.parametrize("name", TOTAL_CAPACITY)
def test_memory_is_what_a_program_can_have(name):
    least, most = TOTAL_CAPACITY[name]
    assert least - 0.01 <= GPU_KINDS[name].memory_bytes / 2**30 <= most
    assert GPU_KINDS[name].memory_source


def test_memory_without_a_report_is_the_advertised_one():
    for kind in GPU_KINDS.values():
        if kind.memory_source is None:
            assert kind.memory_bytes == kind.advertised_gb * 10**9
        else:
            # More than the decimal figure by up to what a binary one would be, or a little less.
            assert 0.95 < kind.memory_bytes / (kind.advertised_gb * 10**9) < 1.074


def test_flash_attention_came_with_bfloat16():
    """Both with compute capability 8.0: the two columns, from different documents, agree."""
    for kind in GPU_KINDS.values():
        assert kind.runs_flash_attention == kind.computes_in("bf16"), kind.name
    told = dataclasses.replace(GPU_KINDS["T4"], attention="flash")
    assert told.runs_flash_attention
    assert not dataclasses.replace(GPU_KINDS["A100-40"], attention="unfused").runs_flash_attention


# Own speeds.

CLUSTER = load_cluster(EXAMPLES / "mini-b.yaml")
PROFILE = EXAMPLES / "mini-profile.json"
FACTORS = (1.0, 1.0, 1.5, 1.0, 1.25, 1.25, 0.8, 1.0)
SPEEDS = [GpuSpeed(factor=each, noise=0.0) for each in FACTORS]


def speeds(*factors: float | None, noise: float = 0.0) -> list[GpuSpeed | None]:
    return [None if each is None else GpuSpeed(factor=each, noise=noise) for each in factors]


@pytest.mark.slow
@pytest.mark.parametrize("measured", [True, False])
def test_the_simulator_has_them_as_slow_ranks(measured: bool, tmp_path: Path) -> None:
    """Compute, optimizer and links: nothing else of the iteration changes."""
    plan = load_plan(EXAMPLES / "mini-b-llama-3b-plan.json")
    workload = workload_of(model="llama-3b", flags=None, seq_length=1024, dtype="float16")
    profile = load_profile(PROFILE) if measured else None
    found = with_own_speeds(CLUSTER, profile, SPEEDS, origin="a run")
    profiles = []
    if found.profile is not None:
        profiles.append(tmp_path / "profile.json")
        save_profile(found.profile, profiles[0])
    corrected = costs_on(
        plan, parse_cluster(dump_cluster(found.cluster).encode()), workload, profiles
    )
    before = costs_on(plan, CLUSTER, workload, [PROFILE] if measured else [])
    slow = Perturbation(rank_factors=dict(enumerate(FACTORS)))
    expected = simulated(plan, before, source="plan", perturbation=slow)
    result = simulated(plan, corrected, source="plan")
    assert result.iteration_s == pytest.approx(expected.iteration_s, rel=1e-9)
    assert expected.iteration_s > 1.1 * simulated(plan, before, source="plan").iteration_s
    assert result.peak_memory_bytes == expected.peak_memory_bytes


def test_what_has_not_changed_stays_as_it_is() -> None:
    data = b"""
nodes:
  - {count: 2, gpus: 2 x V100-16, nics: 100 Gb/s}
  - {name: b, count: 2, gpus: 2 x half, nics: 100 Gb/s, link: PCIe 9 GB/s}
  - p3.16xlarge
gpu_kinds:
  - {name: half, like: A100-40, memory: 20GB}
"""
    before = parse_cluster(data)
    of = [1.0] * before.world_size
    of[1], of[6], of[10] = 2.0, 1.5, 3.0
    found: OwnSpeeds = with_own_speeds(before, None, speeds(*of), origin="a run")
    after = parse_cluster(dump_cluster(found.cluster).encode())
    assert [each.name for each in after.nodes] == [each.name for each in before.nodes]
    for rank, factor in enumerate(of):
        old, new = before.gpu_of_rank(rank), after.gpu_of_rank(rank)
        assert new.memory_bytes == old.memory_bytes
        assert new.peak.of("float16") == pytest.approx(old.peak.of("float16") / factor)
        assert new.memory_bytes_per_s == pytest.approx(old.memory_bytes_per_s / factor)
    for old_node, new_node in zip(before.nodes, after.nodes, strict=True):
        for name in ("link", "nics", "host_link_bytes_per_s", "host_memory_bytes"):
            assert getattr(new_node, name) == getattr(old_node, name)
    again = with_own_speeds(before, None, speeds(*[1.0] * len(of)), origin="a run")
    assert again.cluster == before


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        pytest.param(speeds(1.0, 1.02, 0.99), (1.0, 1.0, 1.0), id="alike"),
        pytest.param(speeds(1.2, 1.2, 1.2), (1.2, 1.2, 1.2), id="a kind"),
        pytest.param(speeds(1.0, 1.5), (1.0, 1.5), id="one of two"),
        pytest.param(speeds(1.2, 1.2, 1.8), (1.2, 1.2, 1.8), id="one more than its kind"),
        pytest.param(speeds(None, 1.2, 1.2, 2.0), (1.2, 1.2, 1.2, 2.0), id="one unknown"),
        pytest.param(speeds(None, None), (1.0, 1.0), id="all unknown"),
        pytest.param(speeds(1.0, 1.3, noise=0.1), (1.15, 1.15), id="two that may be alike"),
        pytest.param(speeds(1.0, 10.0, noise=0.35), (1.0, 10.0), id="no noise is that loud"),
    ],
)
def test_who_is_like_whom(found: list[GpuSpeed | None], expected: tuple[float, ...]) -> None:
    assert alike_factors(("A",) * len(found), found) == pytest.approx(expected)


# Unlikely times.

# 12 * 4096**2 parameters of a layer, 2048 tokens, two operations each, and half of the scores:
# 0.86 TFLOP, in 2.75 ms at the 312 TFLOP/s of NVIDIA's A100 data sheet.
LAYER = {
    "num_layers": 32,
    "hidden_size": 4096,
    "ffn_hidden_size": 16384,
    "num_attention_heads": 32,
    "num_query_groups": 32,
    "kv_channels": 128,
    "seq_length": 2048,
}
PEAK_S = (2 * 2048 * 12 * 4096**2 + 2 * 2048**2 * 4096) / 312e12


def profile(factor, *, kind="A100-80", dtype="bfloat16"):
    """A profile whose times are so many times what the peak needs."""
    value = copy.deepcopy(good())
    value["models"][0] |= LAYER
    value["times"][0] |= {
        "gpu_kind": kind,
        "dtype": dtype,
        "seq_length": 2048,
        "forward_s": [size * factor * PEAK_S for size in (1, 2, 4)],
        "backward_s": [2 * size * factor * PEAK_S for size in (1, 2, 4)],
    }
    return value


def told(value):
    return list(unlikely_times(parse_profile(json.dumps(value).encode()), GPU_KINDS))


@pytest.mark.parametrize("factor", [1.0, 2.0, 2.5, 20.0])
def test_what_gpus_do_is_likely(factor):
    assert told(profile(factor)) == []


@pytest.mark.parametrize(
    ("factor", "said"),
    [
        (1e-30, "the chip's published peak needs 0.0028 s"),
        (0.5, "times are in seconds"),
        (2.5e3, "2,500 times what the chip's published peak needs; were milliseconds"),
    ],
)
def test_what_no_gpu_does_is_told(factor, said, tmp_path, monkeypatch):
    (sentence,) = told(profile(factor))
    assert sentence.startswith("times[0], tiny on A100-80 in bfloat16: forward of 1 sample in ")
    assert said in sentence
    run = runner_in(tmp_path, monkeypatch)
    (tmp_path / "profile.json").write_text(json.dumps(profile(factor)))
    (tmp_path / "cluster.yaml").write_text("nodes: [{gpus: 1 x A100-80}]")
    for command in (
        ("check", "profile.json"),
        ("plan", *WORKLOAD, "--profile", "profile.json"),
    ):
        result = run(*command)
        assert result.exit_code == 0, result.output
        assert f"unlikely: {sentence}" in " ".join(result.output.split())


def test_a_kind_or_type_without_a_published_peak_is_left_alone():
    assert told(profile(1e-9, kind="mine")) == []
    assert told(profile(1e-9, kind="V100-16")) == []  # no units for bfloat16


def test_small_layers_take_as_long_as_their_kernels_start():
    assert told(good()) == []
