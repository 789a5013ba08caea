"""From what ranks report to nodes, and to what is measured: each kind, each pair of kinds, once."""

from dataclasses import replace
from itertools import combinations_with_replacement
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.seen_nodes import clusters, ranks_of, timed
from zorse_megatron.errors import MeasureError
from zorse_megatron.measure.machine import NvmlReader, kinds_of_gpu, nics, nodes_of, processor_name
from zorse_megatron.measure.tasks import link_tasks, missing_tasks


def test_nodes_are_in_the_order_of_their_ranks() -> None:
    nodes = nodes_of(list(reversed(ranks_of([["T4", "T4"], ["L4"]]))))
    assert [node.ranks for node in nodes] == [(0, 1), (2,)]
    assert [node.kind for node in nodes] == [
        "2 x T4, pcie, 1 x 12.5 GB/s",
        "1 x L4, pcie, 1 x 12.5 GB/s",
    ]
    assert kinds_of_gpu(nodes) == {"T4": 0, "L4": 2}


def test_the_worst_link_of_a_node_is_its_link() -> None:
    first, second = ranks_of([["T4", "T4"]])
    first = replace(first, device=replace(first.device, link_type="nvswitch"))
    second = replace(second, device=replace(second.device, link_type="nvlink"))
    assert nodes_of([first, second])[0].link_type == "nvlink"


def test_scattered_ranks_are_refused_with_the_remedy() -> None:
    ranks = ranks_of([["T4"], ["T4"], ["T4"]])
    ranks[2] = replace(ranks[2], node="host0", local_rank=1)
    with pytest.raises(MeasureError, match="ranks 0, 2; expected ranks that follow each other"):
        nodes_of(ranks)


def test_two_ranks_on_one_gpu_are_refused() -> None:
    ranks = ranks_of([["T4", "T4"]])
    with pytest.raises(MeasureError, match="2 ranks with the local number 0"):
        nodes_of([ranks[0], replace(ranks[1], local_rank=0)])


@given(clusters)
def test_every_pair_of_node_kinds_is_measured_once(cluster: list[list[str]]) -> None:
    """Against the pairs of all nodes: no kind of pair is missing, and none comes twice."""
    nodes = nodes_of(ranks_of(cluster))
    tasks = link_tasks(nodes)
    pairs = {
        tuple(sorted((one.kind, other.kind)))
        for number, one in enumerate(nodes)
        for other in nodes[number + 1 :]
    }
    singles = [task for task in tasks if task.operation == "all_reduce" and len(task.nodes) == 2]
    assert sorted(tuple(sorted(task.nodes)) for task in singles) == sorted(pairs)
    kinds = {node.kind for node in nodes if len(node.ranks) > 1}
    inside = [
        task.nodes for task in tasks if task.operation == "all_reduce" and len(task.nodes) == 1
    ]
    assert sorted(inside) == sorted((kind,) for kind in kinds)
    assert len({task.key for task in tasks}) == len(tasks)


@given(clusters)
def test_tasks_name_ranks_of_the_kinds_they_are_about(cluster: list[list[str]]) -> None:
    nodes = nodes_of(ranks_of(cluster))
    node_of = {rank: node for node in nodes for rank in node.ranks}
    kind_of = {r: k for node in nodes for r, k in zip(node.ranks, node.gpu_kinds, strict=True)}
    for task in link_tasks(nodes):
        assert task.gpu_kinds == tuple(kind_of[rank] for rank in task.ranks)
        assert len(set(task.ranks)) == len(task.ranks)
        halves = (task.ranks[: len(task.ranks) // 2], task.ranks[len(task.ranks) // 2 :])
        if task.operation == "send" and len(task.nodes) == 2:
            for half, kind in zip(halves, task.nodes, strict=True):
                assert {node_of[rank].kind for rank in half} == {kind}
            assert node_of[halves[0][0]] is not node_of[halves[1][0]]


def test_a_mixed_node_times_each_pair_of_its_kinds() -> None:
    (node,) = nodes_of(ranks_of([["T4", "T4", "L4"]]))
    sends = [task for task in link_tasks([node]) if task.operation == "send"]
    expected = set(combinations_with_replacement(("T4", "L4"), 2)) - {("L4", "L4")}
    assert {task.gpu_kinds for task in sends} == expected


@pytest.mark.slow
@given(clusters, st.data())
def test_only_what_is_missing_is_measured(cluster: list[list[str]], data: st.DataObject) -> None:
    tasks = link_tasks(nodes_of(ranks_of(cluster)))
    known = [task for task in tasks if data.draw(st.booleans())]
    missing = missing_tasks(tasks, [timed(task) for task in known])
    assert set(missing) == set(tasks) - set(known)


class RecordedNvml:
    """The calls that we make of NVML, answered as by a machine with two GPUs on NVLink."""

    NVML_NVLINK_MAX_LINKS = 4
    NVML_NVLINK_DEVICE_TYPE_GPU, NVML_NVLINK_DEVICE_TYPE_SWITCH = 0, 2
    NVMLError = ValueError

    def __init__(self, lines: dict[int, int | None]) -> None:
        self.lines = lines
        """NVLink line -> what is at its other end; None: it is off. Others do not exist."""

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid not in ("GPU-a", "GPU-b"):
            raise ValueError("not found")
        return uuid

    def nvmlDeviceGetName(self, handle: str) -> str:
        return {"GPU-a": "Tesla V100-SXM2-16GB", "GPU-b": "Tesla T4"}[handle]

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> SimpleNamespace:
        return SimpleNamespace(total=16_900_000_000)

    def nvmlDeviceGetNvLinkState(self, handle: str, line: int) -> int:
        if line not in self.lines:
            raise ValueError("not supported")
        return int(self.lines[line] is not None)

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, handle: str, line: int) -> int | None:
        return self.lines[line]


@pytest.mark.parametrize(
    ("lines", "link"),
    [({}, "pcie"), ({0: None}, "pcie"), ({0: None, 1: 0}, "nvlink"), ({0: 0, 1: 2}, "nvswitch")],
)
def test_nvml_says_what_joins_the_gpus(lines: dict[int, int | None], link: str) -> None:
    seen = NvmlReader(RecordedNvml(lines), ("GPU-a", "GPU-b")).device(0, 2)
    assert (seen.kind, seen.link_type, seen.memory_bytes) == ("V100-16", link, 16_900_000_000)


def test_nvml_leaves_out_what_the_driver_keeps() -> None:
    """As nvidia-smi -q shows it for a T4: torch then has 14.56 GiB, as people report."""

    class Newer(RecordedNvml):
        nvmlMemory_v2 = 2

        def nvmlDeviceGetMemoryInfo(self, handle: str, version: int = 1) -> SimpleNamespace:
            assert version == 2
            return SimpleNamespace(total=15360 * 2**20, reserved=449 * 2**20)

    seen = NvmlReader(Newer({}), ("GPU-b",)).device(0, 1)
    assert round(seen.memory_bytes / 2**30, 2) == 14.56


def test_each_rank_has_its_gpu_and_one_too_many_is_refused() -> None:
    reader = NvmlReader(RecordedNvml({}), ("GPU-a", "GPU-b"))
    assert reader.device(1, 2).kind == "T4"
    with pytest.raises(MeasureError, match="local rank 2 and 2 GPUs"):
        reader.device(2, 3)
    with pytest.raises(MeasureError, match="no answer about GPU-c"):
        NvmlReader(RecordedNvml({}), ("GPU-c",)).device(0, 1)
    only = NvmlReader(RecordedNvml({}), ("GPU-b",))  # each rank is shown its own
    assert only.device(1, 2).kind == "T4"


def test_network_adapters_that_are_up(tmp_path) -> None:
    for card, files in {
        "eth0": {"operstate": "up", "speed": "25000"},
        "eth1": {"operstate": "down", "speed": "25000"},
        "lo": {"operstate": "up"},
    }.items():
        directory = tmp_path / "class" / "net" / card
        directory.mkdir(parents=True)
        if card != "lo":
            (directory / "device").mkdir()
        for name, text in files.items():
            (directory / name).write_text(text + "\n")
    assert [(nic.name, nic.bytes_per_s) for nic in nics(tmp_path)] == [("eth0", 3.125e9)]
    port = tmp_path / "class" / "infiniband" / "mlx5_0" / "ports" / "1"
    port.mkdir(parents=True)
    (port / "state").write_text("4: ACTIVE\n")
    (port / "rate").write_text("100 Gb/sec (4X EDR)\n")
    assert [(nic.name, nic.bytes_per_s) for nic in nics(tmp_path)] == [("mlx5_0:1", 12.5e9)]


def test_the_processor_says_its_name(tmp_path) -> None:
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: Some  CPU @ 2GHz\n")
    assert processor_name(tmp_path / "cpuinfo") == "CPU Some CPU @ 2GHz"
    assert processor_name(tmp_path / "none") == "CPU"
