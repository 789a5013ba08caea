"""From what ranks report to nodes, links, and the curves of times."""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations_with_replacement, pairwise
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.seen_nodes import MEASURED, clusters, ranks_of, timed
from tests.unit.test_run_parts import SetClock
from zorse_megatron.costs.measured_curves import TOLERANCE, fit_curve
from zorse_megatron.costs.topology import topology_of
from zorse_megatron.errors import MeasureError
from zorse_megatron.gpus.known_gpus import GPU_KINDS
from zorse_megatron.inputs.cluster_yaml import parse_cluster
from zorse_megatron.inputs.profile import LinkCurve, Profile, Source, dump_profile, parse_profile
from zorse_megatron.live.run_status import LinkTimes, Messages
from zorse_megatron.measure.machine import kinds_of_gpu, nics, nodes_of, processor_name, seen_gpu
from zorse_megatron.measure.measured_cluster import (
    LARGEST_ERROR,
    cluster_text,
    fit_line,
    kinds_in,
    link_curve,
)
from zorse_megatron.measure.measured_profile import with_links, with_transfers, without_transfers
from zorse_megatron.measure.tasks import link_tasks, missing_tasks
from zorse_megatron.runtime.step_times import StepTimes

# Nodes.


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

    def nvmlDeviceGetNvLinkState(self, handle: str, line: int) -> int:
        if line not in self.lines:
            raise ValueError("not supported")
        return int(self.lines[line] is not None)

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, handle: str, line: int) -> int | None:
        return self.lines[line]


def properties(uuid: str, name: str) -> SimpleNamespace:
    return SimpleNamespace(uuid=uuid, name=name, total_memory=16_900_000_000)


V100, T4, UNKNOWN = (
    properties(uuid, name)
    for uuid, name in (("a", "Tesla V100-SXM2-16GB"), ("b", "Tesla T4"), ("c", "Tesla T4"))
)


@pytest.mark.parametrize(
    ("lines", "link"),
    [({}, "pcie"), ({0: None}, "pcie"), ({0: None, 1: 0}, "nvlink"), ({0: 0, 1: 2}, "nvswitch")],
)
def test_nvml_says_what_joins_the_gpus(lines: dict[int, int | None], link: str) -> None:
    seen = seen_gpu(RecordedNvml(lines), (V100, T4), 0)
    assert (seen.kind, seen.link_type, seen.memory_bytes) == ("V100-16", link, 16_900_000_000)


def test_each_rank_has_its_gpu_and_one_too_many_is_refused() -> None:
    nvml, both = RecordedNvml({}), (V100, T4)
    assert seen_gpu(nvml, both, 1).kind == "T4"
    with pytest.raises(MeasureError, match="local rank 2 and 2 GPUs"):
        seen_gpu(nvml, both, 2)
    with pytest.raises(MeasureError, match="no answer about GPU-c"):
        seen_gpu(nvml, (UNKNOWN,), 0)
    assert seen_gpu(nvml, (T4,), 1).kind == "T4"  # each rank is shown its own


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


# Links.

latencies = st.floats(1e-7, 1e-1)
bandwidths = st.floats(1e6, 1e12)
SIZES = tuple(1024 * 8**power for power in range(6))


def empty() -> Profile:
    return Profile(schema_version=1, sources=(Source(name="zorse discover", kind="measured"),))


@given(latencies, bandwidths)
def test_a_line_is_found_again(latency_s: float, bytes_per_s: float) -> None:
    found = fit_line(SIZES, [latency_s + size / bytes_per_s for size in SIZES])
    for size in SIZES:
        assert found.at(size) == pytest.approx(latency_s + size / bytes_per_s, rel=1e-6)


@pytest.mark.slow
@given(
    st.floats(0, 1, exclude_max=True),
    bandwidths,
    st.lists(st.floats(0.8, 1.25), min_size=6, max_size=6),
)
def test_noise_moves_a_line_no_further_than_itself(
    share: float, bytes_per_s: float, noise: list[float]
) -> None:
    """Least squares: the fit is no further from the points than the true line is.

    As long as the largest message shows the bandwidth at all: the latency is a share of its time.
    """
    latency_s = share * SIZES[-1] / bytes_per_s
    times = [(latency_s + n / bytes_per_s) * e for n, e in zip(SIZES, noise, strict=True)]
    found = fit_line(SIZES, times)

    def distance(line) -> float:
        return sum((line(n) / t - 1) ** 2 for n, t in zip(SIZES, times, strict=True))

    assert found.latency_s >= 0 and found.bytes_per_s > 0
    assert distance(found.at) <= distance(lambda n: latency_s + n / bytes_per_s) + 1e-9


@given(st.lists(st.floats(1e-6, 10), min_size=1, max_size=6))
def test_any_times_make_a_line_that_can_be_used(times: list[float]) -> None:
    found = fit_line(SIZES[: len(times)], times)
    assert found.latency_s >= 0 and 0 < found.bytes_per_s < float("inf")


def test_times_of_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="above 0"):
        fit_line([1024], [0.0])


@pytest.mark.slow
@given(clusters, latencies, bandwidths)
def test_the_cluster_file_loads_back(
    cluster: list[list[str]], latency_s: float, bytes_per_s: float
) -> None:
    nodes = nodes_of(ranks_of(cluster, nics=2))
    answers = [timed(t, latency_s=latency_s, bytes_per_s=bytes_per_s) for t in link_tasks(nodes)]
    known = {kind: MEASURED for kind in kinds_of_gpu(nodes)}
    found = parse_cluster(cluster_text(nodes, known, answers, name="lab").encode())
    assert found.gpu_kinds == tuple(kind for names in cluster for kind in names)
    assert [node.name for node in found.nodes] == [node.name for node in nodes]
    for node, names in zip(found.nodes, cluster, strict=True):
        if len(names) > 1:
            assert node.link.bandwidth_bytes_per_s == pytest.approx(bytes_per_s, rel=1e-3)
            assert node.link.latency_s == pytest.approx(latency_s, rel=1e-3, abs=1e-9)
        if len(cluster) > 1:
            assert node.nics is not None and node.nics.count == 2
            assert node.nics.latency_s == pytest.approx(latency_s, rel=1e-3, abs=1e-9)
            partners = [len(other) for other in cluster if other is not names]
            most = min(len(names), max(partners))
            assert node.nics.total_bytes_per_s == pytest.approx(most * bytes_per_s, rel=1e-3)


def test_an_unknown_kind_is_described_and_a_known_one_is_not() -> None:
    nodes = nodes_of(ranks_of([["T4"], ["Z1"]]))
    known = {"T4": MEASURED, "Z1": MEASURED}
    known["T4"] = kinds_in(parse_cluster(b"nodes: [{gpus: 1 x T4}]"))["T4"]
    text = cluster_text(nodes, known, [timed(task) for task in link_tasks(nodes)])
    found = parse_cluster(text.encode())
    assert found.kinds["T4"] == GPU_KINDS["T4"]
    assert found.kinds["Z1"].memory_bytes == MEASURED.memory_bytes
    assert found.kinds["Z1"].peak.float16_flops_per_s == 4e12
    assert kinds_in(found)["Z1"] == MEASURED


@pytest.mark.slow
@given(clusters, st.floats(1e-6, 1e-4), st.floats(1e8, 1e11))
def test_curves_are_near_their_points_or_left_out(
    cluster: list[list[str]], latency_s: float, bytes_per_s: float
) -> None:
    """Whatever is written can be read by the planner, and prices the messages that were timed."""
    nodes = nodes_of(ranks_of(cluster))
    answers = [timed(t, latency_s=latency_s, bytes_per_s=bytes_per_s) for t in link_tasks(nodes)]
    known = {kind: MEASURED for kind in kinds_of_gpu(nodes)}
    profile = empty()
    for answer in answers:
        profile = with_transfers(profile, answer)
    profile = with_links(profile, "zorse discover", filter(None, map(link_curve, answers)))
    assert parse_profile(dump_profile(profile).encode()) == profile
    spec = topology_of(parse_cluster(cluster_text(nodes, known, answers).encode()), profile)
    for node in spec.nodes:
        for sharing, curve in node.nic_curves:
            errors = sorted(
                abs(curve.transfer_s(size) / (latency_s + size / bytes_per_s) * sharing - 1)
                for size in SIZES
            )
            assert (errors[2] + errors[3]) / 2 <= LARGEST_ERROR + 1e-6


def test_a_message_that_is_timed_again_replaces_the_old_times() -> None:
    (task, *_) = link_tasks(nodes_of(ranks_of([["T4", "T4"]])))
    profile = with_transfers(empty(), timed(task, latency_s=1.0))
    profile = with_transfers(profile, timed(task, latency_s=2.0))
    assert [transfers.time_s[0] > 2 for transfers in profile.transfers] == [True]
    assert without_transfers(profile, [task.key]).transfers == ()
    assert without_transfers(profile, [("send", (), ())]) == profile


def curve(source: str, kind: str) -> LinkCurve:
    return LinkCurve(
        link="intra-node",
        gpu_kind=kind,
        gpus_sharing=2,
        quadratic=0.0,
        linear=1.0,
        constant=10.0,
        max_bytes_per_s=1e10,
        source=source,
    )


def test_curves_of_an_earlier_run_do_not_stay_and_imported_ones_do() -> None:
    old = [curve("zorse discover", "T4"), curve("table", "L4"), curve("table", "A100-40")]
    profile = replace(empty(), links=tuple(old))
    measured = curve("zorse discover", "L4")
    found = with_links(profile, "zorse discover", [measured]).links
    assert found == (curve("table", "A100-40"), measured)


# Of a run.

EDGES = ((0, 1), (0, 2), (1, 0), (2, 0), (2, 1))
BYTES = 4096
STEP_S = 0.5
"""From one message of a link to the next."""


def told(
    links: LinkTimes,
    number: int,
    way_s: dict[tuple[int, int], float],
    offsets: Sequence[float],
    *,
    waited: bool = True,
    back_bytes: int = BYTES,
) -> list[list[float]]:
    """What all ranks tell of an iteration: three messages on each link."""
    rows = []
    for rank in range(3):
        sent = {
            target: [
                (
                    tag,
                    BYTES if source < target else back_bytes,
                    offsets[rank] + tag * STEP_S,
                )
                for tag in (2, 0, 1)
            ]
            for source, target in EDGES
            if source == rank
        }
        arrived = {
            source: [
                (tag, offsets[rank] + tag * STEP_S + way_s[source, target] if waited else None)
                for tag in (1, 0, 2)
            ]
            for source, target in EDGES
            if target == rank
        }
        rows.append(links.row(rank, Messages(number=number, sent=sent, arrived=arrived)))
    return rows


def of_three() -> LinkTimes:
    return LinkTimes(edges=EDGES, world_size=3)


@given(
    ways=st.lists(st.floats(0.001, 0.4), min_size=5, max_size=5),
    offsets=st.lists(st.floats(-1e5, 1e5), min_size=3, max_size=3),
)
def test_clocks_do_not_matter(ways: list[float], offsets: list[float]) -> None:
    links, way_s = of_three(), dict(zip(EDGES, ways, strict=True))
    for number in range(6):
        links.take(told(links, number, way_s, offsets))
    found = {each.ranks: each for each in links.links()}
    assert set(found) == {(0, 1), (0, 2)}  # of (1, 2) nothing goes there
    for (low, high), each in found.items():
        mean_s = (way_s[low, high] + way_s[high, low]) / 2
        assert each.seconds == pytest.approx(mean_s, abs=1e-9)  # of 1e5
        assert (each.num_bytes, each.messages) == (BYTES, 6)


@pytest.mark.parametrize("told_as", [{"waited": False}, {"back_bytes": 2 * BYTES}])
def test_what_nobody_waited_for_and_messages_of_two_sizes_do_not_count(told_as: dict) -> None:
    links, way_s = of_three(), dict.fromkeys(EDGES, 0.1)
    for number in range(6):
        links.take(told(links, number, way_s, (0.0, 0.0, 0.0), **told_as))
    assert links.links() == ()


def test_rows_are_of_one_length() -> None:
    links = of_three()
    rows = told(links, 0, dict.fromkeys(EDGES, 0.1), (0.0, 0.0, 0.0))
    rows.append(links.row(1, None))
    assert {len(row) for row in rows} == {links.width} == {6}
    assert all(map(math.isnan, rows[-1]))


def test_a_rank_notes_what_it_sends_and_what_it_waited_for() -> None:
    clock = SetClock()
    times = StepTimes(clock)
    times.begin(4)
    clock.now_s = 1.0
    times.sent(2, 7, BYTES)
    for tag, waited_s in ((1, 0.5), (3, 0.0)):
        with times.waiting():
            clock.now_s += waited_s
        times.arrived(0, tag)
    times.end()
    assert times.read() is not None
    assert times.messages == Messages(
        number=4, sent={2: [(7, BYTES, 1.0)]}, arrived={0: [(1, 1.5), (3, None)]}
    )


# Curves.


def sizes_and_times():
    sizes = st.lists(st.integers(1, 64), min_size=1, max_size=12, unique=True).map(sorted)
    times = st.floats(1e-6, 10.0)
    return sizes.flatmap(
        lambda found: st.tuples(
            st.just(found), st.lists(times, min_size=len(found), max_size=len(found))
        )
    )


def test_passes_through_good_points():
    curve, replaced = fit_curve([1, 2, 4], [5.0, 7.0, 11.0])
    assert replaced == ()
    assert [curve.at(size) for size in (1, 2, 3, 4)] == [5.0, 7.0, 9.0, 11.0]
    assert curve.at(10) == pytest.approx(11.0 + 6 * 2.0)


def test_one_point():
    curve, _ = fit_curve([4], [8.0])
    assert [curve.at(size) for size in (1, 2, 4, 6)] == [2.0, 4.0, 8.0, 12.0]


def test_below_the_first_point():
    curve, _ = fit_curve([2, 4], [10.0, 16.0])
    assert curve.at(1) == 7.0
    steep, _ = fit_curve([4, 5], [4.0, 9.0])
    assert steep.at(1) == 1.0  # never less than in proportion


# The H100 NVL of the Zorse authors, Llama 13B at sequence 4096, forward and backward (ms).
H100_FORWARD = [8.50, 13.00, 24.81, 33.84, 41.55, 50.34]
H100_BACKWARD = [22.15, 25.00, 65.61, 86.88, 107.45, 127.14]


@pytest.mark.parametrize(
    ("times", "expected"), [(H100_FORWARD, 16.8), (H100_BACKWARD, 43.6)], ids=["forward", "back"]
)
def test_a_point_too_fast_per_sample_is_replaced_and_reported(times, expected):
    curve, replaced = fit_curve(range(1, 7), times)
    (point,) = replaced
    assert point.micro_batch_size == 2
    assert point.measured_s == times[1]
    assert point.used_s == curve.at(2) == pytest.approx(expected, rel=0.02)
    assert [curve.at(size) for size in (1, 3, 6)] == [times[0], times[2], times[5]]


def test_steps_and_bends_stay():
    # A100-80, Llama 13B, sequence 1024, forward: another kernel from five samples on.
    step = [3.66, 7.60, 11.46, 14.84, 15.95, 18.66, 22.12]
    assert fit_curve(range(1, 8), step)[1] == ()
    # L4, Llama 33B, float32, forward: slows down from nine samples on.
    bend = [55.0, 129.6, 213.2, 275.4, 332.7, 400.7, 489.8, 679.8, 1043.1, 1342.3, 1547.3, 1753.1]
    assert fit_curve(range(1, 13), bend)[1] == ()
    # A fixed cost of each micro-batch.
    assert fit_curve([1, 2, 4, 8], [10.0, 11.0, 13.0, 17.0])[1] == ()


def test_falls_are_pooled():
    curve, replaced = fit_curve([1, 2, 3, 4], [10.0, 11.05, 11.0, 12.0])
    assert [point.micro_batch_size for point in replaced] == [2, 3]
    assert curve.at(2) == curve.at(3) == pytest.approx(11.025)


@given(sizes_and_times())
def test_never_falls(points):
    curve, _ = fit_curve(*points)
    sizes = range(1, 130)
    assert all(curve.at(a) <= curve.at(b) * (1 + 1e-9) for a, b in pairwise(sizes))
    assert all(curve.at(size) > 0 for size in sizes)


@given(st.floats(0.0, 5.0), st.floats(0.1, 2.0), st.integers(3, 16))
def test_straight_lines_are_kept_exactly(fixed_samples, slope, count):
    fixed = fixed_samples * slope
    sizes = range(1, count + 1)
    times = [fixed + slope * size for size in sizes]
    curve, replaced = fit_curve(sizes, times)
    assert replaced == ()
    assert [curve.at(size) for size in sizes] == times
    assert curve.at(2 * count) == pytest.approx(fixed + slope * 2 * count)


@given(st.integers(5, 16), st.data())
def test_one_outlier_on_a_line_is_found(count, data):
    index = data.draw(st.integers(1, count - 2))
    factor = data.draw(st.sampled_from([0.5, 0.7, 0.85, 1.2, 1.6]))
    times = [2.0 + size for size in range(1, count + 1)]
    right = times[index]
    times[index] *= factor
    curve, replaced = fit_curve(range(1, count + 1), times)
    assert abs(factor - 1) > TOLERANCE
    assert index + 1 in [point.micro_batch_size for point in replaced]
    assert curve.at(index + 1) == pytest.approx(right, rel=0.1)


def test_no_time_at_all():
    curve, replaced = fit_curve([1, 2, 4], [0.0, 0.0, 0.0])
    assert (curve.at(8), replaced) == (0.0, ())
