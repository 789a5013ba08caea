"""Ranks that are not where the plan means them to be are named; others never are."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zorse_megatron.gpus.known_gpus import GPU_KINDS, kind_of_device
from zorse_megatron.inputs.cluster_yaml import parse_cluster
from zorse_megatron.inputs.rank_placement import RankLocation, placement_problems, unchecked_kinds
from zorse_megatron.measure.machine import SeenDevice

WELL_KNOWN = sorted(GPU_KINDS)

# As drivers print them (NVIDIA's list of supported devices in its driver's README).
NAMES = {
    "NVIDIA A100-SXM4-40GB": "A100-40",
    "NVIDIA A100-PCIE-40GB": "A100-PCIE-40",
    "NVIDIA A100-SXM4-80GB": "A100-80",
    "NVIDIA A100 80GB PCIe": "A100-PCIE-80",
    "NVIDIA H100 80GB HBM3": "H100-80",
    "NVIDIA H100 NVL": "H100-NVL",
    "NVIDIA H100 PCIe": "H100-PCIE-80",
    "NVIDIA H200": "H200",
    "NVIDIA H20": "H20",
    "NVIDIA B200": "B200",
    "NVIDIA A40": "A40",
    "NVIDIA A30": "A30",
    "NVIDIA A10": "A10",
    "NVIDIA L40": "L40",
    "NVIDIA RTX 6000 Ada Generation": "RTX6000-Ada",
    "NVIDIA GeForce RTX 5090": "RTX5090",
    "Tesla V100-PCIE-32GB": "V100-PCIE-32",
    "NVIDIA GH200 480GB": "GH200-96",
    "NVIDIA L40S": "L40S",
    "NVIDIA L4": "L4",
    "NVIDIA A10G": "A10G",
    "NVIDIA RTX A6000": "A6000",
    "NVIDIA GeForce RTX 4090": "RTX4090",
    "NVIDIA GeForce RTX 3090": "RTX3090",
    "NVIDIA GeForce RTX 3080": "RTX3080",
    "Tesla V100-SXM2-16GB": "V100-16",
    "Tesla V100-SXM2-32GB": "V100-32",
    "Tesla V100-PCIE-16GB": "V100-PCIE-16",
    "Tesla T4": "T4",
    "Tesla P100-PCIE-16GB": "P100",
    "Tesla P40": "P40",
    "AMD Radeon PRO W6800": "W6800",
    "NVIDIA RTX 5000 Ada Generation": "RTX5000-Ada",
    "NVIDIA RTX 4500 Ada Generation": "RTX4500-Ada",
    "NVIDIA RTX 4000 Ada Generation": "RTX4000-Ada",
    "NVIDIA RTX 2000 Ada Generation": "RTX2000-Ada",
    "NVIDIA RTX A5000": "A5000",
    "NVIDIA RTX A4500": "A4500",
    "NVIDIA RTX A4000": "A4000",
    "NVIDIA RTX A2000 12GB": "A2000-12",
    "NVIDIA RTX A2000": "A2000-6",
    "NVIDIA GeForce RTX 5080": "RTX5080",
    "NVIDIA GeForce RTX 5070 Ti": "RTX5070Ti",
    "NVIDIA GeForce RTX 5070": "RTX5070",
    "NVIDIA GeForce RTX 4080 SUPER": "RTX4080Super",
    "NVIDIA GeForce RTX 4080": "RTX4080",
    "NVIDIA GeForce RTX 4070 Ti SUPER": "RTX4070TiSuper",
    "NVIDIA GeForce RTX 4070 Ti": "RTX4070Ti",
    "NVIDIA GeForce RTX 4070 SUPER": "RTX4070Super",
    "NVIDIA GeForce RTX 4070": "RTX4070",
    "NVIDIA GeForce RTX 4060": "RTX4060",
    "NVIDIA GeForce RTX 3080 Ti": "RTX3080Ti",
    "NVIDIA GeForce RTX 3070 Ti": "RTX3070Ti",
    "NVIDIA GeForce RTX 3070": "RTX3070",
    "NVIDIA GeForce RTX 3060 Ti": "RTX3060Ti",
    "NVIDIA GeForce RTX 3060": "RTX3060",
    "NVIDIA GeForce RTX 2080 Ti": "RTX2080Ti",
}
OTHERS = [
    "NVIDIA B300",
    "NVIDIA H20-3e",
    "NVIDIA H200 NVL",
    "NVIDIA A100-SXM4-40GB MIG 3g.20gb",
    "NVIDIA GeForce RTX 5090 D",
    "NVIDIA RTX 6000",
    "NVIDIA GeForce RTX 4060 Ti",
    "NVIDIA GeForce RTX 4070 Laptop GPU",
    "NVIDIA RTX A2000 Laptop GPU",
    "NVIDIA RTX 5000 Ada Generation Laptop GPU",
    "",
]


@pytest.mark.parametrize(("name", "kind"), NAMES.items())
def test_names_of_drivers(name: str, kind: str) -> None:
    assert kind_of_device(name) == kind


@pytest.mark.parametrize("name", [name for name in NAMES if "PCI" in name.upper()])
def test_a_card_is_not_taken_to_sit_on_a_board_of_nvlink(name: str) -> None:
    (node,) = parse_cluster(f"nodes: [{{gpus: 4 x {name}}}]".encode()).nodes
    assert node.link.type == "pcie"


# What CUDA gives a program of cards of 16 and of 8 GiB.
@pytest.mark.parametrize(("gib", "kind"), [(15.6, "RTX4060Ti-16"), (7.62, "RTX4060Ti-8")])
def test_memory_tells_cards_of_one_name_apart(gib: float, kind: str) -> None:
    name = "NVIDIA GeForce RTX 4060 Ti"
    assert kind_of_device(name, int(gib * 2**30)) == kind
    device = SeenDevice(name=name, memory_bytes=int(gib * 2**30), link_type="pcie", is_gpu=True)
    assert device.kind == kind


def test_every_well_known_kind_has_a_drivers_name() -> None:
    assert {*NAMES.values(), "RTX4060Ti-16", "RTX4060Ti-8"} == set(GPU_KINDS)


@pytest.mark.parametrize("name", OTHERS)
def test_other_devices_keep_their_names(name: str) -> None:
    assert kind_of_device(name) == name


@given(
    ranks=st.lists(
        st.tuples(
            *[st.sampled_from(WELL_KNOWN[:3])] * 2,
            *[st.sampled_from(["a", "b"])] * 2,
        ),
        min_size=1,
        max_size=8,
    )
)
def test_exactly_the_ranks_that_are_elsewhere_are_named(
    ranks: list[tuple[str, str, str, str]],
) -> None:
    planned, there, planned_node, node = zip(*ranks, strict=True)
    found = [RankLocation(node=n, gpu_kind=kind) for n, kind in zip(node, there, strict=True)]
    problems = placement_problems(found, kinds=planned, nodes=planned_node)
    wrong = [
        (f"rank {rank} on node {n}", what)
        for rank, (kind, other, planned_n, n) in enumerate(ranks)
        for what in [f"node {n}"] * (planned_n != n) + [f"a GPU of kind {other}"] * (kind != other)
    ]
    assert [(problem.where, problem.found) for problem in problems] == wrong


def test_what_the_files_do_not_say_is_not_compared() -> None:
    found = [RankLocation(node="a", gpu_kind="T4")]
    assert placement_problems(found, kinds=None, nodes=None) == []


def test_ranks_without_a_gpu_have_no_kind_to_compare() -> None:
    found = [RankLocation(node="a", gpu_kind=None)]
    assert placement_problems(found, kinds=["T4"], nodes=["a"]) == []


def test_a_kind_of_ones_own_cannot_be_read_off_a_gpu_but_be_declared() -> None:
    found = RankLocation(node="a", gpu_kind="A100-40")
    assert placement_problems([found], kinds=["half an A100"], nodes=None) == []
    assert unchecked_kinds(["half an A100", "T4"]) == ["half an A100"]
    declared = RankLocation(node="a", gpu_kind="A100-40", is_declared=True)
    assert len(placement_problems([declared], kinds=["half an A100"], nodes=None)) == 1
