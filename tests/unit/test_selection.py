"""Which GPUs to train on: more of them never make the answer worse."""

import dataclasses
import json
import math
import random
from functools import cache
from itertools import combinations

import pytest
from typer.testing import CliRunner

from tests.examples import examples
from tests.printed import each_search_once
from tests.topologies import node
from tests.unit.planner_cases import KINDS, random_case
from zorse_megatron.cli.main import app
from zorse_megatron.costs.communication import GraphComm
from zorse_megatron.costs.topology import Topology
from zorse_megatron.inputs.cluster_yaml import parse_cluster
from zorse_megatron.inputs.model import MODELS
from zorse_megatron.plan.plan import ClusterFingerprint
from zorse_megatron.planner.find_plan import find_plan
from zorse_megatron.planner.gpu_selection import WORTH_IT, Point, Search, Selection, explore, fewer
from zorse_megatron.planner.inputs.search_inputs import Inputs, SearchSpace, make_inputs, on_ranks
from zorse_megatron.planner.outcome import NoPlanError

# The T4s are across a line so slow that every activation takes longer than they save.
LAB = """
nodes:
  - {name: near, gpus: 2 x A100-40, nics: 100 Gb/s, region: here}
  - {name: old, gpus: 2 x V100-16, nics: 100 Gb/s, region: here}
  - {name: far, gpus: 2 x T4, nics: 10 Gb/s, region: there}
between_regions: [{bandwidth: 50 Mb/s, latency: 50 ms}]
"""
WORKLOAD = ["--model", "llama-1b", "--global-batch-size", "16", "--dtype", "float16"]
WORKLOAD += ["--seq-length", "512", "--max-tp", "1"]
# Cluster, and the ranks that are faster than all of them were.
NAMED: dict[str, tuple[str, range]] = {
    "two sites": (
        """
nodes:
  - {gpus: 4 x A100-80, nics: 4 x 200 Gb/s, region: one}
  - {gpus: 4 x A100-40, nics: 4 x 200 Gb/s, region: two}
between_regions: [{bandwidth: 1 Gb/s, latency: 20 ms}]
""",
        range(4),
    ),
    "a laptop": (
        "nodes: [{gpus: 4 x A100-80, nics: 10 Gb/s}, {gpus: 1 x RTX4090, nics: 1 Gb/s}]",
        range(4),
    ),
    "old GPUs": (
        "nodes: [{gpus: 4 x A100-40, nics: 100 Gb/s}, {gpus: 4 x T4, nics: 10 Gb/s}]",
        range(4),
    ),
}


def searches(inputs: Inputs) -> Search:
    """The best plans of some GPUs, each searched once; stock's layouts are another test's."""

    @cache
    def iteration_s(ranks: Selection) -> float:
        try:
            return find_plan(on_ranks(inputs, ranks), stock=()).iteration_s
        except NoPlanError:
            return math.inf

    return iteration_s


def explored(inputs: Inputs, search: Search) -> tuple[Point, ...]:
    return explore(inputs, search, part_of=lambda ranks: on_ranks(inputs, ranks))


def random_nodes(seed: int) -> Inputs:
    """Two or three nodes with a GPU or two each, some of them behind slow links."""
    draw, base = random.Random(seed), random_case(seed, most_layers=5)
    nodes = tuple(
        node(
            f"n{number}",
            gpu_kinds=tuple(draw.choice(KINDS) for _ in range(draw.choice((1, 2)))),
            link_bytes_per_s=1e6,
            link_latency_s=1e-4,
            host_link_bytes_per_s=1e6,
            nic_bytes_per_s=draw.choice((2e3, 2e4, 2e5)),
            nic_latency_s=1e-3,
        )
        for number in range(draw.choice((2, 2, 3)))
    )
    spec = Topology.of(nodes)
    kinds = tuple(kind for each in nodes for kind in each.gpu_kinds)
    return dataclasses.replace(
        base,
        spec=spec,
        comm=GraphComm(spec),
        kinds=kinds,
        capacities_bytes=(2 * max(base.capacities_bytes),) * len(kinds),
        host_bytes=(None,) * len(kinds),
        cluster=ClusterFingerprint(gpu_kinds=kinds),
    )


def some_nodes(inputs: Inputs) -> list[Selection]:
    """All GPUs of some nodes, in every way."""
    numbers = range(len(inputs.spec.nodes))
    return [
        tuple(rank for number in some for rank in inputs.spec.ranks_of(number))
        for count in numbers[1:]
        for some in combinations(numbers, count)
    ]


@pytest.mark.slow
@pytest.mark.usefixtures("little_effort")
@pytest.mark.parametrize("seed", range(examples(6)))
def test_more_nodes_never_make_it_worse(seed: int) -> None:
    """The answer for a cluster against a search of its own for each subset of its nodes."""
    inputs = random_nodes(seed)
    search = searches(inputs)
    best_s = explored(inputs, search)[0].iteration_s
    for ranks in some_nodes(inputs):
        assert best_s <= search(ranks) / WORTH_IT


@pytest.mark.slow
@pytest.mark.usefixtures("little_effort")
@pytest.mark.parametrize(("text", "fast"), NAMED.values(), ids=NAMED)
def test_gpus_that_slowed_the_others(text: str, fast: range) -> None:
    """They took 2.3, 1.15 and 1.03 times as long with all GPUs."""
    inputs = make_inputs(
        parse_cluster(text.encode()),
        dataclasses.replace(MODELS["llama-7b"], seq_length=2048),
        None,
        global_batch_size=8,
        dtype="float16",
        space=SearchSpace(max_tensor_parallel=1, split_backward=False),
    )
    search = searches(inputs)
    found = explored(inputs, search)
    alone_s = search(tuple(fast))
    assert found[0].iteration_s <= alone_s / WORTH_IT
    everything = next(point for point in found if len(point.ranks) == inputs.world_size)
    assert everything.iteration_s > alone_s / WORTH_IT
    assert len(found[0].ranks) < inputs.world_size


@pytest.mark.parametrize(
    ("all_s", "few_s", "used"), [(1e4, 9985, 2), (1e4, 9975, 1), (math.inf, 9985, 1)]
)
def test_gpus_are_not_left_out_for_nothing(all_s: float, few_s: float, used: int) -> None:
    """Fewer have to be faster by 0.2 %, or the only ones that anything fits on."""
    inputs = random_nodes(0)
    times = {tuple(range(inputs.world_size)): all_s}

    def known(ranks: Selection) -> float:
        return times.get(ranks, few_s)

    point, *_ = explore(
        inputs,
        known,
        part_of=lambda ranks: on_ranks(inputs, ranks),
        short=known,
    )
    assert (len(point.ranks) == inputs.world_size) == (used == 2)


@cache
def sixteen() -> Inputs:
    """GPUs that are alike, on a fast network."""
    text = "nodes: [{count: 2, gpus: 8 x A100-40, nics: 8 x 200 Gb/s}]"
    return make_inputs(
        parse_cluster(text.encode()),
        dataclasses.replace(MODELS["llama-7b"], seq_length=2048),
        None,
        global_batch_size=64,
        dtype="float16",
    )


def test_a_bound_spares_the_search_on_clusters_of_equal_gpus() -> None:
    """No second search, in short or in full: half the GPUs cannot be as fast."""
    inputs, searched = sixteen(), []
    best_s = 3.0  # a third more than the fastest plan takes

    def known(ranks: Selection) -> float:
        searched.append(ranks)
        return best_s

    points = explore(inputs, known, part_of=lambda ranks: on_ranks(inputs, ranks), short=known)
    assert searched == [tuple(range(16))]
    assert len(points) == 1


def test_what_is_left_out_are_the_last_gpus_of_nodes_and_whole_nodes() -> None:
    """Local ranks stay what they are."""
    text = "nodes: [{gpus: [1 x L4, 1 x T4], count: 2, nics: 9 Gb/s}, {gpus: 2 x T4, nics: 9 Gb/s}]"
    inputs = make_inputs(
        parse_cluster(text.encode()),
        dataclasses.replace(MODELS["llama-1b"], seq_length=64),
        None,
        global_batch_size=8,
        dtype="float16",
    )
    found = [(each.ranks, each.of_nodes) for each in fewer(inputs, tuple(range(6)))]
    assert found == [
        ((0, 2), True),
        ((0, 1, 2, 3), True),
        ((4, 5), True),
        ((0, 1, 4, 5), True),
        ((0, 1, 2, 4, 5), False),
        ((0, 1, 2, 3, 4), False),
    ]


@pytest.fixture(name="lab")
def lab_file(tmp_path, monkeypatch: pytest.MonkeyPatch):
    """In a directory of its own."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lab.yaml").write_text(LAB)
    return tmp_path


def planned(*options: str) -> tuple[int, dict]:
    """Exit status and answer."""
    words = ["plan", "--cluster", "lab.yaml", *WORKLOAD, "--json", *options]
    result = CliRunner().invoke(app, words)
    return result.exit_code, json.loads(result.stdout)


@pytest.mark.slow
@pytest.mark.usefixtures("little_effort", "few_layouts")
@each_search_once()
def test_gpus_that_slow_the_others_are_spares(lab) -> None:
    """Other commands take the plan with the cluster file beside it, and say so given the whole."""
    status, answer = planned("--out", "plan.json")
    assert status == 0
    assert answer["left_out_ranks"] == [4, 5]
    assert answer["used_cluster"] == "plan.cluster.yaml"
    everything = next(each for each in answer["selections"] if len(each["ranks"]) == 6)
    assert answer["iteration_s"] < everything["iteration_s"]
    used = parse_cluster((lab / "plan.cluster.yaml").read_bytes())
    assert [node.name for node in used.nodes] == ["near", "old"]
    checked = CliRunner().invoke(app, ["check", "plan.json", "plan.cluster.yaml"])
    assert checked.exit_code == 0, checked.output
    for command in (
        "check plan.json lab.yaml",
        "explain plan.json --cluster lab.yaml --model llama-1b",
    ):
        wrong = CliRunner().invoke(app, [*command.split(), "--json"])
        assert wrong.exit_code == 1
        assert "Give plan.cluster.yaml: the cluster file of its GPUs" in wrong.stdout
    status, all_used = planned("--out", "all.json", "--use-all")
    assert all_used["iteration_s"] == everything["iteration_s"]
    assert not (lab / "all.cluster.yaml").exists()
    status, _ = planned("--out", "plan.json")  # its own file is replaced
    assert status == 0
    same = ("--cluster", "plan.cluster.yaml", "--use-all", "--out", "plan.json")
    planned(*same)  # and stays where it is an input
    assert (lab / "plan.cluster.yaml").exists()
    planned("--out", "plan.json", "--use-all")  # and gone where it is of another plan
    assert not (lab / "plan.cluster.yaml").exists()


def test_what_cannot_be_is_told_before_the_search(lab) -> None:
    """The cluster file beside the plan replaces no input and nothing that somebody else wrote."""
    (lab / "plan.cluster.yaml").write_text("nodes: []\n")
    status, answer = planned("--out", "plan.json")
    (problem,) = answer["problems"]
    assert (status, problem["where"]) == (1, "--out plan.json")
    assert problem["found"] == "plan.cluster.yaml, which zorse plan has not written"
    (lab / "lab.cluster.yaml").write_text(
        "# Written by `zorse plan`: the GPUs that its plan uses.\n"
    )
    status, answer = planned("--cluster", "lab.cluster.yaml", "--out", "lab.json")
    assert "a file that this command reads" in answer["problems"][0]["found"]
    status, answer = planned("--out", "/dev/stdout")
    assert "a stream" in answer["problems"][0]["found"]
    (lab / "my.cluster.yaml").mkdir()
    status, answer = planned("--out", "my.json")
    assert "a directory" in answer["problems"][0]["found"]
