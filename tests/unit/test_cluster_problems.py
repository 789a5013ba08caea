"""Malformed and absurd cluster files: each gives one clear message, all at once and with a line."""

import dataclasses
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zorse_megatron.errors import ClusterError
from zorse_megatron.inputs.cluster_yaml import load_cluster, parse_cluster

LIKE = "gpu_kinds: [{{name: Z1, like: {}}}]\nnodes: [{{gpus: 4 x Z1}}]"


def problems(text):
    try:
        parse_cluster(text.encode(), source="c.yaml")
    except ClusterError as error:
        return error.problems
    return ()


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ClusterError, match="no readable file") as caught:
        load_cluster(tmp_path / "cluster.yaml")
    assert "rank" not in caught.value.problems[0].remedy  # most commands have none


VALUES = st.sampled_from(
    ["", "x", "3", "-1", "1e400", "null", "true", "[]", "{}", "4 x T4", "1 Gb/s", ".nan", "[[1]]"]
)


@pytest.mark.slow
@given(st.data())
def test_any_value_anywhere_gives_a_cluster_or_problems(data):
    def draw(default):
        return data.draw(VALUES) if data.draw(st.integers(0, 5)) == 0 else default

    text = f"""
name: {draw("lab")}
gpu_kinds: [{{name: {draw("K")}, like: {draw("T4")}, memory: {draw("8GB")}}}]
nodes:
  - {{name: {draw("a")}, count: {draw("2")}, gpus: {draw("2 x K")}, nics: {draw("1 Gb/s")},
     switch: {draw("s")}, region: {draw("r")}, host_memory: {draw("1TB")}, link: {draw("PCIe")}}}
switches: [{{name: {draw("s")}, region: {draw("r")}, uplink: {draw("{bandwidth: 1 Gb/s}")}}}]
between_regions: {draw("[]")}
"""
    for problem in problems(text):
        assert problem.where.startswith("c.yaml: ")
        assert all(dataclasses.astuple(problem))


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("H100", ["H100-80", "H100-NVL", "H100-PCIE-80"]),
        ("nvidia h100", ["H100-80", "H100-NVL", "H100-PCIE-80"]),
        ("A100 PCIe", ["A100-PCIE-80", "A100-PCIE-40"]),
        ("A100", ["A100-80", "A100-40", "A100-PCIE-80", "A100-PCIE-40"]),
        ("Tesla V100", ["V100-32", "V100-16", "V100-PCIE-32", "V100-PCIE-16"]),
        ("V100-SXM2", ["V100-32", "V100-16"]),
        ("RTX 6000", ["RTX6000-Ada"]),
    ],
)
def test_a_model_of_several_kinds_is_asked_for(name, kinds):
    (problem,) = problems(f"nodes: [{{gpus: 4 x {name}}}]")
    assert re.findall(r"(\S+) \(", problem.expected) == kinds
    assert problem.remedy.startswith("Say which one")


@pytest.mark.parametrize(
    ("name", "whose"),
    [
        ("MI300X", "AMD"),
        ("AMD Instinct MI250X", "AMD"),
        ("MI100", "AMD"),
        ("MI355X", "AMD"),
        ("Radeon RX 7900 XTX", "AMD"),
        ("W6800", "AMD"),
        ("Gaudi3", "Intel"),
        ("TPU v5e", "TPU"),
        ("trn1", "AWS"),
    ],
)
@pytest.mark.parametrize("form", ["nodes: [{{gpus: 4 x {}}}]", LIKE])
def test_what_is_not_nvidias_is_refused_by_name(name, whose, form):
    (problem,) = problems(form.format(name))
    assert name in problem.found and whose in problem.found
    assert problem.expected == "GPUs of NVIDIA"
    assert "CUDA" in problem.remedy


@pytest.mark.parametrize(
    "name",
    [
        "RTX 4070 Laptop",
        "NVIDIA GeForce RTX 3080 Laptop GPU",
        "RTX A5000 Mobile",
        "RTX 2080 Max-Q",
        "RTX4070Laptop",
        "RTX_4090_Mobile",
        "RTX4090M",
    ],
)
@pytest.mark.parametrize("form", ["nodes: [{{gpus: 4 x {}}}]", LIKE])
def test_a_laptops_gpu_is_not_taken_for_a_desktop_card(name, form):
    (problem,) = problems(form.format(name))
    assert problem.found == f'"{name}", a GPU of a laptop'
    assert "Did you mean" not in problem.remedy and "zorse profile measure" in problem.remedy


def test_cards_of_one_name_are_told_apart_by_their_memory():
    (problem,) = problems("nodes: [{gpus: 4 x RTX 4060 Ti}]")
    assert "does not say which one" in problem.found
    assert "RTX4060Ti-16 (16 GB" in problem.expected and "RTX4060Ti-8 (8 GB" in problem.expected


def test_what_is_described_may_have_any_name():
    described = (
        "{name: MI300X, memory: 192GB, memory_bandwidth: 5.3 TB/s, peak: {float32: 163 TFLOPS}}"
    )
    assert not list(problems(f"gpu_kinds: [{described}]\nnodes: [{{gpus: 4 x MI300X}}]"))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("Tesla T4", "T4"),
        ("NVIDIA A100-SXM4-80GB", "A100-80"),
        ("NVIDIA H100 80GB HBM3", "H100-80"),
        ("NVIDIA GeForce RTX 4090", "RTX4090"),
    ],
)
def test_names_of_drivers_are_known(name, kind):
    (node,) = parse_cluster(f"nodes: [{{gpus: 4 x {name}}}]".encode()).nodes
    assert node.gpu_kinds == (kind,) * 4
