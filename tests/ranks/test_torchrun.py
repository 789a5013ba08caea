"""torchrun, started on each node as printed: every process gets the rank of the cluster file, and a
dead one is named before torchrun ends the others.
"""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks.test_watch import watched_environment
from zorse_megatron.inputs.cluster_yaml import parse_cluster
from zorse_megatron.launch.torchrun_lines import torchrun_lines
from zorse_megatron.launch.training_command import MODULE, TrainingCommand
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


@pytest.mark.parametrize(
    ("deaths", "named", "status"),
    [
        ("1:kill others:lose", "rank 1 was killed by signal 9 (SIGKILL) in iteration 5", -9),
        # Here torchrun sees the death first, and ends the other rank of the node by SIGTERM.
        ("1:kill-watcher", "rank 1 is gone, and so is the process that watched it", -9),
    ],
)
def test_names_a_dead_rank_of_two_nodes(
    deaths: str, named: str, status: int, tmp_path: Path
) -> None:
    """With torchrun's own grace; nodes have unequal numbers of GPUs, rank 0 is on the other one."""
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *words],
            env=os.environ
            | watched_environment(deaths, tmp_path)
            | {"ZORSE_NODE_NAME": node.name, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node, words in zip(CLUSTER.nodes, torchrun_words(), strict=True)
    ]
    outputs = [process.communicate(timeout=60)[0] for process in started]
    assert all(process.returncode for process in started)
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
