"""Malformed and absurd cluster files: each gives one clear message, all at once and with a line."""

import dataclasses
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zorse_megatron.errors import ClusterError
from zorse_megatron.schema.cluster.cluster_yaml import load_cluster, parse_cluster

NODE = "gpus: 4 x T4, nics: 10 Gb/s"
LIKE = "gpu_kinds: [{{name: Z1, like: {}}}]\nnodes: [{{gpus: 4 x Z1}}]"


def problems(text):
    try:
        parse_cluster(text.encode(), source="c.yaml")
    except ClusterError as error:
        return error.problems
    return ()


ONE_PROBLEM = {
    "not an object": ("[1, 2]", "top level", "[1, 2] (a list)", "an object"),
    "a text": ("hello", "top level", '"hello" (a string)', "an object"),
    "no nodes": ("name: x", "top level", 'no key "nodes"', "every required key"),
    "empty nodes": ("nodes: []", "line 1: nodes", "[]", "at least 1 entry"),
    "nodes is a number": ("nodes: 3", "line 1: nodes", "3", "a list"),
    "node is a number": ("nodes:\n  - 3", "line 2: nodes[0]", "3", "an object"),
    "unknown key": (
        f"nodes:\n  - {{{NODE}, nic: 1}}",
        "line 2: nodes[0]",
        'unknown key "nic"',
        "only the keys name, count",
    ),
    "too few numbers": (
        "nodes: [{gpus: 2 x T4, gpu_numbers: [1]}]",
        "line 1: nodes[0].gpu_numbers",
        "[1], for 2 GPUs",
        "one number for each GPU, each once",
    ),
    "a number twice": (
        "nodes: [{gpus: 2 x T4, gpu_numbers: [1, 1]}]",
        "line 1: nodes[0].gpu_numbers",
        "[1, 1], for 2 GPUs",
        "one number for each GPU, each once",
    ),
    "unknown kind": (
        "nodes: [{gpus: 4 x A1000-40}]",
        "line 1: nodes[0].gpus[0].kind",
        '"A1000-40", which is not a known kind of GPU',
        "a well-known kind or one of gpu_kinds",
    ),
    "ambiguous kind": (
        "nodes: [{gpus: 4 x A100}]",
        "gpus[0].kind",
        '"A100", which does not say which one',
        "one of A100-80 (80 GB at 2.0 TB/s, nvswitch), A100-40 (40 GB at 1.6 TB/s, nvswitch)",
    ),
    "ambiguous bandwidth": (
        "nodes: [{gpus: 4 x T4, link: pcie 6 gb/s}]",
        "line 1: nodes[0].link.bandwidth",
        '"6 gb/s"',
        "6 GB/s or 6 Gb/s",
    ),
    "unknown instance": (
        "nodes: [p4d.24xlage]",
        "line 1: nodes[0].instance",
        '"p4d.24xlage", which is not a known cloud instance',
        "one of the instances",
    ),
    "no gpus": ("nodes: [{nics: 1 Gb/s}]", "nodes[0]", "a node without gpus", "gpus or instance"),
    "zero nodes": (f"nodes: [{{{NODE}, count: 0}}]", "nodes[0].count", "0", "at least 1"),
    "zero gpus": ("nodes: [{gpus: 0 x T4}]", "nodes[0].gpus[0].count", "0", "at least 1"),
    "half a node": (f"nodes: [{{{NODE}, count: 1.5}}]", "nodes[0].count", "1.5", "an integer"),
    "bool for a count": (f"nodes: [{{{NODE}, count: true}}]", "count", "true", "an integer"),
    "a million nodes too many": (
        f"nodes: [{{{NODE}, count: 999999999999}}]",
        "nodes",
        "3999999999996 GPUs",
        "at most 1000000",
    ),
    "a node too large": ("nodes: [{gpus: 5000 x T4}]", "gpus", "5000 GPUs in one node", "256"),
    "no unit": (
        "nodes: [{gpus: T4, nics: 100}]",
        "nodes[0].nics.bandwidth",
        "100",
        "a bandwidth of 1 kB/s to 1 PB/s",
    ),
    "wrong unit": ("nodes: [{gpus: T4, nics: 100 GB}]", "bandwidth", '"100 GB"', "with its unit"),
    "infinite": ("nodes: [{gpus: T4, nics: .inf}]", "bandwidth", "Infinity", "1 kB/s to 1 PB/s"),
    "negative latency": (
        "nodes: [{gpus: T4, link: {type: pcie, latency: -5 us}}]",
        "nodes[0].link.latency",
        '"-5 us"',
        "0 to 100 s",
    ),
    "unknown link": (
        "nodes: [{gpus: T4, link: nvlinks 5 GB/s}]",
        "nodes[0].link.type",
        '"nvlinks"',
        "'nvswitch', 'nvlink' or 'pcie'",
    ),
    "unusual link": (
        "nodes: [{gpus: A100-40, link: PCIe}]",
        "nodes[0].link",
        "pcie without bandwidth, where nvswitch is usual",
        "the bandwidth",
    ),
    "no nics": (
        "nodes:\n  - {gpus: T4, nics: 1 Gb/s}\n  - {gpus: T4}",
        "line 3: nodes[1]",
        "a node without nics beside other nodes",
        "the network adapters",
    ),
    "same names": (
        f"nodes: [{{{NODE}, name: a}}, {{{NODE}, name: a}}]",
        "nodes",
        '2 entries with the name "a"',
        "a different name for every node",
    ),
    "a number for a name": (f"nodes: [{{{NODE}, name: 3}}]", "nodes[0].name", "3", "a string"),
    "an empty name": (f"nodes: [{{{NODE}, name: ''}}]", "name", '""', "not empty"),
    "memory of nothing": (
        "gpu_kinds: [{name: T4, memory: 0 GB}]\nnodes: [{gpus: T4}]",
        "gpu_kinds[0].memory",
        '"0 GB"',
        "1 MB to 1 PB",
    ),
    "a kind without figures": (
        "gpu_kinds:\n  - {name: X1, memory: 8GB}\nnodes: [{gpus: X1}]",
        "line 2: gpu_kinds[0]",
        'kind "X1" without memory_bandwidth, peak',
        "every value",
    ),
    "a kind like nothing": (
        "gpu_kinds: [{name: X1, like: T5}]\nnodes: [{gpus: X1}]",
        "gpu_kinds[0].like",
        '"T5"',
        "a kind that gives the values",
    ),
    "a kind twice": (
        "gpu_kinds: [{name: T4, memory: 8GB}, {name: T4, memory: 9GB}]\nnodes: [{gpus: T4}]",
        "gpu_kinds",
        '2 entries with the name "T4"',
        "a different name for every kind",
    ),
    "unknown switch": (
        f"nodes: [{{{NODE}, switch: leaf}}]\nswitches: [leaf0]",
        "nodes[0].switch",
        '"leaf", which is not in switches',
        "the name of a switch",
    ),
    "switch twice": (
        f"nodes: [{{{NODE}}}]\nswitches: [a, a]",
        "switches[1].name",
        '"a" for a second time',
        "a different name",
    ),
    "uplink to nowhere": (
        f"nodes: [{{{NODE}}}]\nswitches: [{{name: a, uplink: {{to: b, bandwidth: 1 Gb/s}}}}]",
        "line 2: switches[0].uplink.to",
        '"b", which is not in switches',
        "the name of another switch",
    ),
    "uplink to itself": (
        f"nodes: [{{{NODE}}}]\nswitches: [{{name: a, uplink: {{to: a, bandwidth: 1 Gb/s}}}}]",
        "switches[0].uplink.to",
        'lead back to "a"',
        "end at a switch without to",
    ),
    "uplink into another region": (
        f"nodes: [{{{NODE}, region: a, switch: s}}, {{{NODE}, region: b}}]\n"
        "switches:\n"
        "  - {name: s, region: a, uplink: {to: t, bandwidth: 1 Gb/s}}\n"
        "  - {name: t, region: b}\n"
        "between_regions: [{bandwidth: 1 Gb/s, latency: 1 ms}]",
        "line 3: switches[0].uplink.to",
        '"t", a switch of region "b"',
        'a switch of region "a"',
    ),
    "a name that a count makes": (
        f"nodes: [{{{NODE}, name: a, count: 2}}, {{{NODE}, name: a-1}}]",
        "nodes",
        '2 nodes with the name "a-1"',
        "a different name for every node",
    ),
    "a name that nodes without one get": (
        f"nodes: [{{{NODE}, name: node-1}}, {{{NODE}}}]",
        "nodes",
        '2 nodes with the name "node-1"',
        "a different name for every node",
    ),
    "some nodes without region": (
        f"nodes:\n  - {{{NODE}, region: a}}\n  - {{{NODE}}}\n"
        "between_regions: [{bandwidth: 1 Gb/s, latency: 1 ms}]",
        "line 3: nodes[1]",
        "a node without region",
        "for every node or for none",
    ),
    "regions without link": (
        f"nodes: [{{{NODE}, region: a}}, {{{NODE}, region: b}}]",
        "top level",
        "no link between the regions a | b",
        "links that join all regions",
    ),
    "link of a region to itself": (
        f"nodes: [{{{NODE}, region: a}}]\n"
        "between_regions: [{regions: [a, a], bandwidth: 1 Gb/s, latency: 1 ms}]",
        "between_regions[0].regions",
        "[a, a]",
        "two different regions",
    ),
    "link to no region": (
        f"nodes: [{{{NODE}, region: a}}]\n"
        "between_regions: [{regions: [a, b], bandwidth: 1 Gb/s, latency: 1 ms}]",
        "between_regions[0].regions",
        '"b", where no node is',
        "regions that have nodes: a",
    ),
    "link twice": (
        f"nodes: [{{{NODE}, region: a}}, {{{NODE}, region: b}}]\nbetween_regions:\n"
        "  - {regions: [a, b], bandwidth: 1 Gb/s, latency: 1 ms}\n"
        "  - {regions: [b, a], bandwidth: 2 Gb/s, latency: 1 ms}",
        "line 4: between_regions[1]",
        "a second entry for the same regions",
        "one entry for each pair",
    ),
    "switch of another region": (
        f"nodes: [{{{NODE}, region: a, switch: s}}, {{{NODE}, region: b}}]\n"
        "switches: [{name: s, region: b}]\n"
        "between_regions: [{bandwidth: 1 Gb/s, latency: 1 ms}]",
        "nodes[0].switch",
        'at switch "s" in region "b"',
        "a switch of the same region",
    ),
    "key twice": (
        f"nodes: [{{{NODE}}}]\nnodes: [g5.12xlarge]",
        "line 2: top level",
        "nodes",
        "once",
    ),
}


@pytest.mark.parametrize("case", ONE_PROBLEM)
def test_one_clear_message(case):
    text, where, found, expected = ONE_PROBLEM[case]
    (problem,) = problems(text)
    assert problem.where.startswith("c.yaml: ")
    assert where in problem.where
    assert found in problem.found
    assert expected in problem.expected
    assert problem.remedy.endswith((".", "?"))


@pytest.mark.parametrize(
    ("text", "suggestion"),
    [
        ("nodes: [{gpus: 4 x A1000-40}]", "A100-40"),
        ("nodes: [{gpus: 4 x H100-8}]", "H100-80"),
        ("nodes: [p4d.24xlage]", "p4d.24xlarge"),
        (f"nodes: [{{{NODE}, nic: 1}}]", "nics"),
        (f"nodes: [{{{NODE}, switch: leef}}]\nswitches: [leaf]", "leaf"),
    ],
)
def test_did_you_mean(text, suggestion):
    (problem,) = problems(text)
    assert f'Did you mean "{suggestion}"?' in problem.remedy


def test_all_problems_at_once():
    found = problems(
        "nodes:\n  - {gpus: 4 x Z9}\n  - {gpus: 4 x T4, link: NVLink}\n  - {instance: x}\n"
    )
    assert [problem.where for problem in found] == [
        "c.yaml: line 2: nodes[0].gpus[0].kind",
        "c.yaml: line 3: nodes[1].link",
        "c.yaml: line 4: nodes[2].instance",
        "c.yaml: line 2: nodes[0]",
        "c.yaml: line 3: nodes[1]",
    ]


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
