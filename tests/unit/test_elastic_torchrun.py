"""Elastic jobs of torchrun: who meets, which ranks processes become, the commands of the nodes."""

import json
import os
import shlex
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.run import get_args_parser

from tests.unit.cli_samples import FLAGS
from zorse_megatron.cli.commands import elastic
from zorse_megatron.errors import LaunchError, Problem
from zorse_megatron.inputs.cluster_yaml import parse_cluster
from zorse_megatron.launch.elastic_ranks import Answers, Arrival, answers_for
from zorse_megatron.launch.replan import GivenUp, JobFiles, Replanner, Starts, nodes_left
from zorse_megatron.launch.training_command import elastic_torchrun_lines
from zorse_megatron.processes import free_port

CLUSTER = parse_cluster(b"""
nodes:
  - {name: b, gpus: 2 x L4, nics: 10 Gb/s}
  - {name: a, gpus: 3 x T4, nics: 10 Gb/s}
  - {name: c, gpus: 1 x L4, nics: 10 Gb/s}
""")
SIZES = {node.name: len(node.gpu_kinds) for node in CLUSTER.nodes}


class Planned(Replanner):
    """Plans at once, for whatever there is."""

    def files_for(self, present: object) -> JobFiles:
        left = nodes_left(CLUSTER, set(present))  # type: ignore[call-overload]
        name = "-".join(left.names)
        return JobFiles(
            plan=Path(f"{name}.json"), cluster=Path(f"{name}.yaml"), left=left, is_new=True
        )


PLANNED = Planned(plan=Path("p.json"), cluster=Path("c.yaml"), directory=Path("d"), training=())


class Begun(Starts):
    """Writes nothing, and never gives up."""

    def begin(self, nodes: Sequence[str], *, is_first: bool) -> None:
        pass


PROBLEM = Problem(where="n", found="2 GPUs", expected="3", remedy="Wait.")
BEGUN = Begun(directory=Path("d"), run="run", save=None, max_failures=9)


def answers(
    arrivals: Sequence[Arrival], *, replanner: Replanner = PLANNED, starts: Starts = BEGUN
) -> Answers:
    return answers_for(CLUSTER, replanner, starts, arrivals, was_requeued=False)


def arrivals_of(nodes: Sequence[str]) -> list[Arrival]:
    return [
        Arrival(node=node, local_rank=rank, free_port=ord(node) * 10 + rank, address=f"host-{node}")
        for node in nodes
        for rank in range(SIZES[node])
    ]


@given(st.permutations(list(SIZES)), st.integers(1, 3))
def test_ranks_follow_the_cluster_file(order: list[str], count: int) -> None:
    """Whatever order torchrun's rendezvous has brought the nodes in."""
    nodes = order[:count]
    arrivals = arrivals_of(nodes)
    told = answers(arrivals)
    found = {
        (each.node, each.local_rank): answer["variables"]
        for each, answer in zip(arrivals, told, strict=True)
    }
    there = [(name, local) for name in SIZES if name in nodes for local in range(SIZES[name])]
    assert [int(found[key]["RANK"]) for key in there] == list(range(len(there)))
    first = there[0][0]
    assert {v["MASTER_ADDR"] for v in found.values()} == {f"host-{first}"}
    assert {v["MASTER_PORT"] for v in found.values()} == {str(ord(first) * 10)}
    assert {v["WORLD_SIZE"] for v in found.values()} == {str(len(there))}
    assert {answer["plan"] for answer in told} == {
        "-".join(name for name in SIZES if name in nodes) + ".json"
    }


def test_nodes_that_are_not_as_in_the_cluster_file_are_told_at_once() -> None:
    strange = [Arrival(node="x", local_rank=0, free_port=1), *arrivals_of(["b", "a"])[:3]]
    (told,) = {str(answer["error"]) for answer in answers(strange)}
    assert "1. x: found a node that the cluster file lacks" in told
    assert "2. a: found 1 processes; expected 3" in told


def test_two_machines_of_one_name_are_told() -> None:
    """Each with a part of the node's GPUs: the count of processes is right."""
    first, second = arrivals_of(["b"])
    told = answers([first, replace(second, local_rank=0)])
    assert "b: found 2 processes with local ranks [0]" in str(told[0]["error"])


def test_nodes_that_are_cut_off_are_told() -> None:
    class CutOff(Planned):
        def files_for(self, present: object) -> JobFiles:
            files = super().files_for({"b"})
            return replace(files, left=replace(files.left, cut_off=("a",), lost=("c",)))

    cut_off = CutOff(plan=Path("p.json"), cluster=Path("c.yaml"), directory=Path("d"), training=())
    told = answers(arrivals_of(["b", "a"]), replanner=cut_off)
    assert all("a: found no link to b" in str(answer["error"]) for answer in told)
    assert [answer["leaves"] for answer in told] == [False] * 2 + [True] * 3


def test_a_node_that_has_lost_a_gpu_leaves() -> None:
    b, *others = arrivals_of(["b", "a"])
    told = answers([replace(b, gpus=2), *others])
    assert not any("error" in answer for answer in told)
    told = answers([replace(b, gpus=1), *others])
    assert all("b: found fewer GPUs than in the cluster" in str(each["error"]) for each in told)
    assert [answer["leaves"] for answer in told] == [True] * 2 + [False] * 3


@pytest.mark.parametrize(
    ("restarts", "was_requeued", "is_first"),
    [((0, 0), False, True), ((0, 1), False, False), ((0, 0), True, False)],
)
def test_all_leave_a_job_that_is_given_up(
    restarts: tuple[int, int], was_requeued: bool, is_first: bool
) -> None:
    """Whether it is a job's first start is not for one agent to say: each counts its own."""
    seen = []

    class Ends(Begun):
        def begin(self, nodes: Sequence[str], *, is_first: bool) -> None:
            seen.append((nodes, is_first))
            raise GivenUp("the job ends", [PROBLEM])

    ends = Ends(directory=Path("d"), run="run", save=None, max_failures=9)
    arrivals = [
        replace(each, restarts=count)
        for each, count in zip(arrivals_of(["b"]), restarts, strict=True)
    ]
    told = answers_for(CLUSTER, PLANNED, ends, arrivals, was_requeued=was_requeued)
    assert [answer["leaves"] for answer in told] == [True] * 2
    assert seen == [(["b"], is_first)]


def test_what_cannot_be_planned_is_told_to_all() -> None:
    class Fails(Replanner):
        def files_for(self, present: object) -> JobFiles:
            raise LaunchError("too few GPUs are left", [PROBLEM])

    fails = Fails(plan=Path("p.json"), cluster=Path("c.yaml"), directory=Path("d"), training=())
    told = answers(arrivals_of(["b"]), replanner=fails)
    assert len(told) == 2
    assert all("too few GPUs" in str(answer["error"]) for answer in told)
    assert not any(answer["leaves"] for answer in told)  # a node may come


@pytest.mark.parametrize(("min_gpus", "fewest"), [(1, 1), (3, 1), (4, 2), (5, 2), (6, 3)])
def test_torchrun_understands_the_commands(min_gpus: int, fewest: int) -> None:
    words = ["plan.json", "--cluster", "c d.yaml", "--", "--num-layers", "4"]
    text = elastic_torchrun_lines(
        CLUSTER,
        words,
        name="zorse-7",
        min_gpus=min_gpus,
        master_address=None,
        master_port=29501,
    )
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    for node, line in zip(CLUSTER.nodes, lines, strict=True):
        *variables, command = line.split(" ", 2)
        assert variables == [
            "CUDA_DEVICE_ORDER=PCI_BUS_ID",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1",
        ]
        read = get_args_parser().parse_args(shlex.split(command)[1:])
        assert (read.nnodes, read.nproc_per_node) == (f"{fewest}:3", str(len(node.gpu_kinds)))
        assert (read.rdzv_endpoint, read.rdzv_id) == ("b:29501", "zorse-7")
        assert (read.training_script, read.training_script_args) == (
            "zorse_megatron",
            ["join", *words],
        )


def test_launch_prints_what_join_takes(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    base = ("launch", "plan.json", "--cluster", "cluster.yaml", "--torchrun", "--elastic")
    saved = (*FLAGS, "--save", "s", "--save-interval", "9")
    told = run(*base, "--min-gpus", "3", "--json", "--", *saved)
    assert told.exit_code == 0, told.output
    line = json.loads(told.output)["lines"].splitlines()[1]
    words = shlex.split(line)
    variables = dict(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1")
    variables |= {"MASTER_PORT": str(free_port()), "TORCHELASTIC_USE_AGENT_STORE": "False"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    started: list[list[str]] = []
    answer = {**ANSWER}
    monkeypatch.setattr(elastic, "answers_for", lambda *_, **__: [answer])
    monkeypatch.setattr(elastic, "end_with_parent", lambda: None)
    monkeypatch.setattr(elastic.os, "execve", lambda _, words, env: started.append([*words]))
    joined = run(*words[words.index("join") :])
    assert joined.exit_code == 0, joined.output
    assert "3 GPUs, without old: plan p.json (as before)" in joined.output
    ours = ["--zorse-plan", "p.json", "--zorse-cluster", "c.yaml", "--load", "s"]
    assert started[0][3:] == [
        *saved,
        *ours,
        "--exit-signal-handler",
        "--zorse-damaged-checkpoint",
        "skip",
    ]
    ended: list[tuple[int, int]] = []
    monkeypatch.setattr(elastic.os, "kill", lambda *told: ended.append(told))
    for leaves in (False, True):
        answer.update(error="no plan fits", leaves=leaves)
        monkeypatch.setenv("MASTER_PORT", str(free_port()))
        failed = run(*words[words.index("join") :])
        assert failed.exit_code == 1 and "error: no plan fits" in failed.output
    assert ended == [(os.getppid(), signal.SIGTERM)] and len(started) == 1


ANSWER = {
    "variables": {"RANK": "0", "WORLD_SIZE": "3"},
    "plan": "p.json",
    "cluster": "c.yaml",
    "is_new": False,
    "without": ["old"],
}


def test_join_without_torchrun_says_what_to_use(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    told = run("join", "plan.json", "--cluster", "cluster.yaml", "--", *FLAGS)
    assert told.exit_code == 1
    assert "zorse launch --elastic" in " ".join(told.output.split())
