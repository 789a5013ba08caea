"""torchrun, started on each node as printed, gives every process the rank of the cluster file."""

import os
import shlex
import socket
import subprocess
import sys

from zorse_megatron.launch.torchrun_lines import torchrun_lines
from zorse_megatron.launch.training import MODULE, Training
from zorse_megatron.schema.cluster_yaml import parse_cluster

CLUSTER = parse_cluster(
    b"nodes:\n"
    b"  - {name: a, gpus: 1 x T4, nics: 1 Gb/s}\n"
    b"  - {name: b, gpus: 3 x L4, nics: 1 Gb/s}\n"
    b"  - {name: c, gpus: 2 x T4, nics: 1 Gb/s}\n"
)
SAY_WHICH = ("sh", "-c", "echo $ZORSE_NODE_NAME $LOCAL_RANK $RANK $WORLD_SIZE")


def test_nodes_with_unequal_numbers_of_gpus() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    training = Training(words=SAY_WHICH, resumes=False)
    text = torchrun_lines(CLUSTER, training, master_address="127.0.0.1", master_port=port)
    lines = [shlex.split(line) for line in text.splitlines() if line and line[0] != "#"]
    started = []
    for node, (_, program, *words) in zip(CLUSTER.nodes, lines, strict=True):
        assert program == "torchrun"
        cut = words.index("-m")
        assert words[cut + 1] == MODULE
        started.append(
            subprocess.Popen(
                [
                    *(sys.executable, "-m", "torch.distributed.run", *words[:cut]),
                    *("--no-python", *words[cut + 2 :]),
                ],
                env=os.environ | {"ZORSE_NODE_NAME": node.name, "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                text=True,
            )
        )
    said = "".join(process.communicate(timeout=120)[0] for process in started)
    assert sorted(line.split() for line in said.splitlines()) == sorted(
        [node.name, str(local), str(node.first_rank + local), str(CLUSTER.world_size)]
        for node in CLUSTER.nodes
        for local in range(len(node.gpu_kinds))
    )
