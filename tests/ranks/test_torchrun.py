"""torchrun, started on each node as printed: every process gets the rank of the cluster file, and a
dead one is named before torchrun ends the others.
"""

import os
import shlex
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.ranks.forked import start
from tests.ranks.test_watch import watched_environment
from zorse_megatron.inputs.cluster_yaml import parse_cluster
from zorse_megatron.launch.training_command import MODULE, TrainingCommand, torchrun_lines
from zorse_megatron.processes import free_port

CLUSTER = parse_cluster(
    b"nodes:\n"
    b"  - {name: a, gpus: 1 x T4, nics: 1 Gb/s}\n"
    b"  - {name: b, gpus: 2 x L4, nics: 1 Gb/s}\n"
)
SAY_WHICH = "echo this is $ZORSE_NODE_NAME $LOCAL_RANK $RANK $WORLD_SIZE"
ENTRY = f"exec {shlex.quote(sys.executable)} -m tests.ranks.watched_entry"


def torchrun_words() -> list[list[str]]:
    """For each node what it gives torchrun, with a command that is no Megatron."""
    command = ("sh", "-c", f"{SAY_WHICH}; {ENTRY}")
    training = TrainingCommand(words=command, resumes=False)
    text = torchrun_lines(CLUSTER, training, master_address="127.0.0.1", master_port=free_port())
    found = []
    for line in text.splitlines():
        if line and line[0] != "#":
            _, program, *words = shlex.split(line)
            cut = words.index("-m")
            assert (program, words[cut + 1]) == ("torchrun", MODULE)
            found.append([*words[:cut], "--no-python", *words[cut + 2 :]])
    return found


DEATHS = [
    ("1:kill others:lose", "rank 1 was killed by signal 9 (SIGKILL) in iteration 5", -9),
    # Here torchrun sees the death first, and ends the other rank of the node by SIGTERM.
    ("1:kill-watcher", "rank 1 is gone, and so is the process that watched it", -9),
]


KILLED_AGENT = "1:kill-agent"


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a job's torchruns have ended, by node."""

    statuses: list[int]
    outputs: list[str]


def run(deaths: str, work: Path) -> Ended:
    pipes = [work / node.name for node in CLUSTER.nodes]
    with ThreadPoolExecutor() as pool:
        reading = []
        for pipe in pipes:
            os.mkfifo(pipe)
            reading.append(pool.submit(pipe.read_text))
        agents = [
            start(
                "torch.distributed.run",
                words,
                os.environ
                | watched_environment(deaths, work)
                | {"ZORSE_NODE_NAME": node.name, "OMP_NUM_THREADS": "1"},
                pipe,
            )
            for node, words, pipe in zip(CLUSTER.nodes, torchrun_words(), pipes, strict=True)
        ]
        outputs = [each.result(timeout=60) for each in reading]
        for agent in agents:
            agent.join(60)
        return Ended(statuses=[agent.exitcode for agent in agents], outputs=outputs)


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """All jobs, at a time, as they mostly wait."""
    words = [*(deaths for deaths, _, _ in DEATHS), KILLED_AGENT]
    with ThreadPoolExecutor() as pool:
        works = [tmp_path_factory.mktemp("job") for _ in words]
        return dict(zip(words, pool.map(run, words, works), strict=True))


@pytest.mark.parametrize(("deaths", "named", "status"), DEATHS)
def test_names_a_dead_rank_of_two_nodes(
    deaths: str, named: str, status: int, ended: dict[str, Ended]
) -> None:
    """With torchrun's own grace; nodes have unequal numbers of GPUs, rank 0 is on the other one."""
    outputs = ended[deaths].outputs
    assert all(ended[deaths].statuses)
    lines = [line for output in outputs for line in output.splitlines()]
    assert sorted(line.split()[2:] for line in lines if line.startswith("this is ")) == sorted(
        [node.name, str(local), str(node.first_rank + local), str(CLUSTER.world_size)]
        for node in CLUSTER.nodes
        for local in range(len(node.gpu_kinds))
    )
    said = [line for line in lines if "zorse: error" in line]
    assert len(said) == 1 and named in said[0], outputs
    # torchrun blames the same rank: it is the first that it has seen to end.
    first = outputs[1][outputs[1].index("first observed failure") :]
    assert "rank      : 1 " in first and f"exitcode  : {status} " in first
    assert "exitcode  : 3 " in outputs[0]


def test_no_rank_outlives_a_killed_agent(ended: dict[str, Ended]) -> None:
    """Ranks keep its output open for as long as they are there: `run` waits for that, too."""
    job = ended[KILLED_AGENT]
    assert job.statuses[1] == -signal.SIGKILL and job.statuses[0]
    said = [line for output in job.outputs for line in output.splitlines() if "zorse: er" in line]
    assert len(said) == 1 and "is gone, and so is the process that watched it" in said[0]
