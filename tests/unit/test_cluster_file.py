"""Cluster files: what they say, quantities and YAML in them, and every name of a GPU."""

import dataclasses
import math
import re
from itertools import accumulate, pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic_core import PydanticCustomError

from zorse_megatron.errors import ClusterError
from zorse_megatron.files.quantities import (
    BANDWIDTH,
    COMPUTE_RATE,
    LATENCY,
    MEMORY_SIZE,
    NETWORK_BANDWIDTH,
)
from zorse_megatron.files.yaml_text import read_yaml
from zorse_megatron.gpus.known_gpus import GPU_KINDS, INSTANCES, is_foreign
from zorse_megatron.inputs.cluster import Link, Nics
from zorse_megatron.inputs.cluster_yaml import CLUSTER_FILE, load_cluster, parse_cluster

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))
NVIDIA_KINDS = sorted(name for name in GPU_KINDS if not is_foreign(name))


def cluster(text):
    return parse_cluster(text.encode(), source="cluster.yaml")


def test_short_form():
    found = cluster("nodes:\n  - {count: 2, gpus: 8 x A100-40, nics: 4 x 100 Gb/s}")
    assert found.gpu_kinds == ("A100-40",) * 16
    assert [node.name for node in found.nodes] == ["node-0", "node-1"]
    assert [node.ranks for node in found.nodes] == [range(8), range(8, 16)]
    node = found.nodes[1]
    assert node.nics == Nics(count=4, bandwidth_bytes_per_s=12.5e9, latency_s=20e-6)
    assert node.nics.total_bytes_per_s == 50e9
    assert (node.link.type, node.link.bandwidth_bytes_per_s) == ("nvswitch", 243e9)
    assert node.host_link_bytes_per_s == 24e9
    assert node.region == found.regions[0]


def test_short_and_long_forms_are_equal():
    short = cluster("nodes: [{gpus: 4xT4, link: PCIe 6 GB/s, nics: 25 Gb/s}, g5.12xlarge]")
    long = cluster(
        """
nodes:
  - count: 1
    gpus: [{kind: T4, count: 2}, {kind: t4}, T4]
    link: {type: pcie, bandwidth: 6e9, latency: 10 us}
    nics: {count: 1, bandwidth: 3125 MB/s, latency: 20e-6}
  - instance: g5.12xlarge
    gpus: 4 x a10g
"""
    )
    assert short == long


def test_everything_explicit():
    found = cluster(
        """
name: lab
gpu_kinds:
  - {name: big, like: A100-80, memory: 96GiB}
  - name: own
    memory: 10GB
    memory_bandwidth: 500 GB/s
    peak: {float32: 20 TFLOP/s, float16: 40 TFLOP/s}
nodes:
  - {name: a, count: 2, gpus: 2 x big, nics: 100 Gb/s, host_memory: 1 TB, host_link: 20 GB/s,
     switch: leaf, region: west}
  - name: b
    gpus: [1 x own, 1 x V100-16]
    nics: {bandwidth: 10 Gb/s, latency: 50 us}
    region: east
switches:
  - {name: leaf, region: west, uplink: {to: spine, bandwidth: 400 Gb/s, latency: 1 us}}
  - {name: spine, region: west}
between_regions:
  - {regions: [east, west], bandwidth: 5 Gb/s, latency: 60 ms}
"""
    )
    assert found.name == "lab"
    assert found.gpu_kinds == ("big", "big", "big", "big", "own", "V100-16")
    assert list(found.kinds) == ["big", "own", "V100-16"]
    assert [node.name for node in found.nodes] == ["a-0", "a-1", "b"]
    assert found.gpu_of_rank(0).memory_bytes == 96 * 2**30
    assert found.gpu_of_rank(0).peak == GPU_KINDS["A100-80"].peak
    assert found.gpu_of_rank(4).peak.of("float16") == 40e12
    assert found.gpu_of_rank(4).memory_bytes_per_s == 500e9
    assert found.node_of_rank(3).host_memory_bytes == 10**12
    assert found.node_of_rank(3).host_link_bytes_per_s == 20e9
    # A node with several kinds has the link of the slowest.
    assert found.node_of_rank(5).link.type == "pcie"
    assert found.node_of_rank(5).nics.latency_s == 50e-6
    leaf, spine = found.switches
    assert leaf.uplink_to == "spine"
    assert leaf.uplink == Link(bandwidth_bytes_per_s=50e9, latency_s=1e-6)
    assert (spine.uplink_to, spine.uplink) == (None, None)
    assert found.regions == ("west", "east")
    (between,) = found.region_links
    assert (between.bandwidth_bytes_per_s, between.latency_s) == (0.625e9, 0.06)
    assert found.fingerprint().gpu_kinds == found.gpu_kinds


def test_a_well_known_kind_can_be_changed():
    found = cluster("gpu_kinds: [{name: T4, memory: 15GB}]\nnodes: [{gpus: 1 x T4}]")
    assert found.gpu_of_rank(0).memory_bytes == 15 * 10**9
    assert found.gpu_of_rank(0).peak == GPU_KINDS["T4"].peak


def test_what_is_said_goes_over_the_instance():
    found = cluster("nodes: [{instance: p4d.24xlarge, gpus: 4 x A100-80, nics: 50 Gb/s}]")
    node = found.nodes[0]
    assert node.gpu_kinds == ("A100-80",) * 4
    assert node.nics.total_bytes_per_s == 6.25e9
    assert node.host_memory_bytes == INSTANCES["p4d.24xlarge"].host_memory_bytes


def test_one_entry_for_all_other_pairs_of_regions():
    nodes = "".join(f"  - {{gpus: T4, nics: 1 Gb/s, region: {name}}}\n" for name in "abc")
    links = "  - {bandwidth: 1 Gb/s, latency: 9 ms}\n"
    special = "  - {regions: [c, a], bandwidth: 2 Gb/s, latency: 1 ms}\n"
    found = cluster(f"nodes:\n{nodes}between_regions:\n{links}{special}")
    rates = {frozenset(link.regions): link.bandwidth_bytes_per_s for link in found.region_links}
    assert rates == {frozenset("ab"): 125e6, frozenset("bc"): 125e6, frozenset("ac"): 250e6}


def test_a_single_node_needs_no_nics():
    assert cluster("nodes: [{gpus: 4 x L4}]").nodes[0].nics is None


def test_ranks_outside():
    found = cluster("nodes: [{gpus: 4 x L4}]")
    for rank in (-1, 4):
        with pytest.raises(ValueError, match="ranks 0 to 3"):
            found.node_of_rank(rank)


@given(
    st.lists(
        st.tuples(st.integers(1, 4), st.integers(1, 8), st.sampled_from(NVIDIA_KINDS)),
        min_size=1,
        max_size=5,
    )
)
def test_ranks_are_dealt_out_in_order(entries):
    lines = [f"  - {{count: {n}, gpus: {g} x {kind}, nics: 10 Gb/s}}" for n, g, kind in entries]
    found = cluster("nodes:\n" + "\n".join(lines))
    assert found.gpu_kinds == tuple(kind for n, g, kind in entries for _ in range(n * g))
    assert found.world_size == len(found.gpu_kinds)
    assert len({node.name for node in found.nodes}) == len(found.nodes)
    firsts = [node.first_rank for node in found.nodes]
    assert firsts == [0, *accumulate(len(node.gpu_kinds) for node in found.nodes)][:-1]
    for node in found.nodes:
        for rank in node.ranks:
            assert found.node_of_rank(rank) is node
            assert found.gpu_of_rank(rank).name == found.gpu_kinds[rank]
    assert all(first.ranks.stop == second.ranks.start for first, second in pairwise(found.nodes))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_load(path):
    assert load_cluster(path).world_size


def test_examples_are_the_clusters_of_the_paper():
    sizes = {path.stem: load_cluster(path).world_size for path in EXAMPLES}
    assert sizes == {
        **dict.fromkeys(("mini-a", "mini-b", "mini-c"), 8),
        "fine-tuning-lab": 6,
        "two-node-lab": 8,
        "two-sites": 8,
        "zorse-paper-cluster-a": 20,
        "zorse-paper-cluster-b": 64,
        "zorse-paper-cluster-c": 128,
    }


@pytest.mark.parametrize("name", INSTANCES)
def test_instances(name):
    found = cluster(f"nodes: [{{instance: {name}, count: 2}}]")
    instance = INSTANCES[name]
    assert found.gpu_kinds == (instance.gpu_kind,) * (2 * instance.gpu_count)
    assert found.nodes[0].nics.count == instance.nic_count


# Problems.

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
    "name",
    [
        *("MI300X", "AMD Instinct MI250X", "MI100", "MI355X", "Radeon RX 7900 XTX", "W6800"),
        *("Gaudi3", "TPU v5e", "trn1"),
    ],
)
@pytest.mark.parametrize("form", ["nodes: [{{gpus: 4 x {}}}]", LIKE])
def test_what_is_not_nvidias_is_refused_by_name(name, form):
    (problem,) = problems(form.format(name))
    assert problem.found == f'"{name}", which is not of NVIDIA'
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


# YAML.


def read(text):
    return read_yaml(text.encode(), "c.yaml", CLUSTER_FILE)


def problem_of(data):
    with pytest.raises(ClusterError) as caught:
        read_yaml(data, "c.yaml", CLUSTER_FILE)
    (problem,) = caught.value.problems
    return problem


def test_scalars_are_those_of_yaml_1_2():
    value, _, problems = read(
        "a: 1e9\nb: yes\nc: 1:30\nd: 2024-01-01\ne: 010\nf: '1'\ng: true\nh: ~\ni: .5\nj: 1_000"
    )
    assert problems == []
    assert value == {
        "a": 1e9,
        "b": "yes",
        "c": "1:30",
        "d": "2024-01-01",
        "e": 10,
        "f": "1",
        "g": True,
        "h": None,
        "i": 0.5,
        "j": "1_000",
    }
    assert isinstance(value["a"], float)


def test_special_numbers():
    value, _, _ = read("[.inf, -.inf, .nan, " + "9" * 6000 + "]")
    assert value[0] == math.inf
    assert value[1] == -math.inf
    assert math.isnan(value[2])
    assert value[3] == math.inf


def test_lines():
    _, lines, _ = read("# comment\nnodes:\n  - gpus: 1\n\n    nics: {count: 1,\n      x: 2}\n")
    assert lines["nodes"] == 2
    assert lines["nodes[0]"] == lines["nodes[0].gpus"] == 3
    assert lines["nodes[0].nics.x"] == 6


def test_repeated_keys_are_reported_with_their_line():
    _, _, problems = read("a: 1\nb: {c: 1,\n  c: 2}\na: 3")
    assert [(problem.where, problem.found) for problem in problems] == [
        ("c.yaml: line 3: b", 'key "c" more than once'),
        ("c.yaml: line 4: top level", 'key "a" more than once'),
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "where", "found"),
    [
        ("", "c.yaml", "an empty file"),
        ("  \n", "c.yaml", "an empty file"),
        ("# nothing\n", "c.yaml", "comments only"),
        ("a: [1", "c.yaml: line 2 column 1", "text that is not YAML"),
        ("a: b: c", "c.yaml: line 1 column 5", "text that is not YAML"),
        ("a:\n\t- b", "c.yaml: line 2 column 1", "text that is not YAML"),
        ("a: 1\n---\nb: 2", "c.yaml: line 2 column 1", "another document"),
        ("a: &x 1\nb: *x", "c.yaml: line 1", "an anchor or alias"),
        ("b: !!int 3", "c.yaml: line 1", "a tag (tag:yaml.org,2002:int)"),
        ("x: !!python/object/apply:os.system [ls]", "c.yaml: line 1", "a tag"),
        ("? [1, 2]\n: 3", "c.yaml: line 1", "a key that is not plain text"),
        ("[" * 100 + "]" * 100, "c.yaml: line 1", "nested too deeply"),
        ("[" * 9000, "c.yaml: line 1", "nested too deeply"),
        ('a: "\\ud800"', "c.yaml: line 1 column 7", "text that is not YAML"),
        (
            "a: &x [1, 1]\n" + "".join(f"{b}: &{b} [*x, *x]\n" for b in "bcdefghij"),
            "c.yaml: line 1",
            "alias",
        ),
        (
            "nodes: [" + "1, " * 260_000 + "1]",
            "c.yaml: line 1",
            "more than 250,000 keys and values",
        ),
    ],
)
def test_unreadable(text, where, found):
    problem = problem_of(text.encode())
    assert problem.where == where
    assert found in problem.found
    assert problem.expected == "a cluster in YAML, in UTF-8"
    assert problem.remedy


def test_not_utf_8():
    assert "byte 0xff" in problem_of(b"a: \xff").found


@given(st.text(max_size=40) | st.binary(max_size=40).map(lambda data: data.decode("latin-1")))
def test_any_text_gives_a_value_or_one_problem(text):
    try:
        read_yaml(text.encode("utf-8", "surrogatepass"), "c.yaml", CLUSTER_FILE)
    except ClusterError as error:
        assert len(error.problems) == 1


def test_what_is_called_json_is_json():
    read_json = {"a": [1, {"b": 2.5}]}
    value, lines, problems = read_yaml(b'{\n "a": [1, {"b": 2.5}]\n}', "c.json", CLUSTER_FILE)
    assert (value, lines["a"], problems) == (read_json, 2, [])
    with_tabs, _, problems = read_yaml(b'{\n\t"a": [1, {"b": 2.5}]\n}', "c.json", CLUSTER_FILE)
    assert (with_tabs, problems) == (read_json, [])
    for text, where in ((b'{"a": 1,}', "line 1 column 9"), (b"a: 1", "line 1 column 1")):
        with pytest.raises(ClusterError) as caught:
            read_yaml(text, "C.JSON", CLUSTER_FILE)
        (problem,) = caught.value.problems
        assert problem.where == f"C.JSON: {where}"
        assert "not JSON" in problem.found and problem.expected == "a cluster in JSON, in UTF-8"


@pytest.mark.parametrize(
    ("quantity", "text", "value"),
    [
        (MEMORY_SIZE, "80GiB", 80 * 2**30),
        (MEMORY_SIZE, "80 GB", 80e9),
        (MEMORY_SIZE, "1.5 TB", 1.5e12),
        (MEMORY_SIZE, 16_000_000_000, 16e9),
        (BANDWIDTH, "50 Gb/s", 6.25e9),
        (BANDWIDTH, "50Gbps", 6.25e9),
        (BANDWIDTH, "220 GB/s", 220e9),
        (BANDWIDTH, "1 GiB/s", 2**30),
        (BANDWIDTH, 1e9, 1e9),
        (BANDWIDTH, "1e9 B/s", 1e9),
        (LATENCY, "5 us", 5e-6),
        (LATENCY, "50 us", 50e-6),
        (LATENCY, "5 µs", 5e-6),
        (LATENCY, "60ms", 60e-3),
        (LATENCY, 0, 0.0),
        (COMPUTE_RATE, "312 TFLOP/s", 312e12),
        (COMPUTE_RATE, "35TFLOPS", 35e12),
        (MEMORY_SIZE, "80gb", 80e9),
        (MEMORY_SIZE, "80 GIB", 80 * 2**30),
        (LATENCY, "5 US", 5e-6),
        (COMPUTE_RATE, "35 tflops", 35e12),
        (NETWORK_BANDWIDTH, "100 gb/s", 12.5e9),
        (NETWORK_BANDWIDTH, "100gbps", 12.5e9),
        (NETWORK_BANDWIDTH, "100 Gb/S", 12.5e9),
        (NETWORK_BANDWIDTH, "100 gB/s", 100e9),
        (NETWORK_BANDWIDTH, "100 GBIT/S", 12.5e9),
        (BANDWIDTH, "100 Gb/S", 12.5e9),
        (BANDWIDTH, "100 gB/s", 100e9),
        (BANDWIDTH, "100 GB/S", 100e9),
        (NETWORK_BANDWIDTH, "100 GB/S", 100e9),
        (NETWORK_BANDWIDTH, "100 GiB/S", 100 * 2**30),
        (BANDWIDTH, "100 gbit/s", 12.5e9),
    ],
)
def test_values(quantity, text, value):
    assert quantity.parse(text) == value


@pytest.mark.parametrize(
    ("quantity", "text", "expected"),
    [
        (MEMORY_SIZE, "80", "with its unit"),
        (MEMORY_SIZE, 80, "1 MB to 1 PB"),
        (MEMORY_SIZE, "80 Gb", "with its unit"),
        (MEMORY_SIZE, "-80 GB", "1 MB to 1 PB"),
        (MEMORY_SIZE, "80 GB/s", "with its unit"),
        (BANDWIDTH, "fast", "with its unit"),
        (BANDWIDTH, 50, "1 kB/s to 1 PB/s"),
        (BANDWIDTH, "1e999 GB/s", "1 kB/s to 1 PB/s"),
        (BANDWIDTH, float("nan"), "1 kB/s to 1 PB/s"),
        (BANDWIDTH, 10**4000, "1 kB/s to 1 PB/s"),
        (BANDWIDTH, True, "such as"),
        (BANDWIDTH, ["50 Gb/s"], "such as"),
        (BANDWIDTH, "100 gb/s", "100 GB/s or 100 Gb/s: whether gb/s is bytes or bits"),
        (BANDWIDTH, "100 gbps", "100 GBps or 100 Gbps"),
        (BANDWIDTH, "100 GBPS", "100 GBps or 100 Gbps"),
        (NETWORK_BANDWIDTH, "100 GBPS", "100 GBps or 100 Gbps"),
        (LATENCY, "3 h", "with its unit"),
        (LATENCY, 5000, "0 to 100 s"),
        (COMPUTE_RATE, 312, "1 GFLOP/s"),
    ],
)
def test_refused(quantity, text, expected):
    with pytest.raises(PydanticCustomError) as caught:
        quantity.parse(text)
    assert expected in str(caught.value)


@given(st.floats(1e3, 1e14), st.sampled_from(["B/s", "kB/s", "MB/s", "GB/s"]))
def test_a_byte_is_eight_bits(value, unit):
    in_bits = unit.replace("B", "b")
    rate = value / BANDWIDTH.units[unit]
    assert BANDWIDTH.parse(f"{8 * rate!r} {in_bits}") == pytest.approx(value)


@given(
    st.sampled_from([MEMORY_SIZE, BANDWIDTH, NETWORK_BANDWIDTH]),
    st.integers(1, 900),
    st.data(),
)
def test_the_case_of_letters_never_takes_bits_for_bytes(quantity, number, data):
    """Of a unit in any case of letters: what its `b` or `B` says, or a refusal."""
    unit = data.draw(st.sampled_from(sorted(each for each in quantity.units if each)))
    upper = data.draw(st.lists(st.booleans(), min_size=len(unit), max_size=len(unit)))
    text = "".join(s.upper() if up else s.lower() for s, up in zip(unit, upper, strict=True))
    expected = quantity.units[unit] * number
    try:
        found = quantity.parse(f"{number} {text}")
    except PydanticCustomError:
        return
    kept = "bit" in unit or text[unit.lower().index("b")] == unit[unit.lower().index("b")]
    if kept and not (unit.count("/") and text.islower()):
        assert found == pytest.approx(expected)
