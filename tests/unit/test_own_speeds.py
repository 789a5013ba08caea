"""Files in which single GPUs have other speeds, against the simulator's own slow ranks."""

from pathlib import Path

import pytest

from tests.unit.cli_samples import EXAMPLES
from zorse_megatron.cli.simulated import simulated
from zorse_megatron.cli.workload import workload_of
from zorse_megatron.cli.workload_costs import costs_on
from zorse_megatron.costs.own_speeds import GpuSpeed, OwnSpeeds, alike_factors, with_own_speeds
from zorse_megatron.inputs.cluster_yaml import dump_cluster, load_cluster, parse_cluster
from zorse_megatron.inputs.profile import load_profile, save_profile
from zorse_megatron.plan.plan_file import load_plan
from zorse_megatron.simulate.assumptions import Perturbation

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
    ],
)
def test_who_is_like_whom(found: list[GpuSpeed | None], expected: tuple[float, ...]) -> None:
    assert alike_factors(("A",) * len(found), found) == pytest.approx(expected)
