"""Runs the process that measures layers, and reads what it answers."""

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from zorse_megatron.errors import MeasureError, Problem
from zorse_megatron.measure.tasks.layer_request import Answer, LayerRequest, answer_from_json

_TAIL_LINES = 25


def measured_layers(
    script: Path | None, flags: Sequence[str], request: LayerRequest, local_rank: int
) -> Iterator[Answer]:
    """Yield what the process answers. Raises MeasureError with its last lines if it fails."""
    reading, writing = os.pipe()
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "zorse_megatron.measure.on_ranks.layers_main"),
                *(str(writing), request.to_json()),
                *([str(script)] if script else []),
                *flags,
            ],
            env=_environment(local_rank),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=[writing],
        )
        os.close(writing)
        try:
            with os.fdopen(reading) as answers:
                for line in answers:
                    yield answer_from_json(line)
            status = process.wait()
        finally:
            process.kill()
            process.wait()
        if status:
            log.seek(0)
            raise _failure(status, log.read())


def _environment(local_rank: int) -> dict[str, str]:
    """The only rank of a job of its own; torchrun's agent must not be asked for its store."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("TORCHELASTIC_")}
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return kept | {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _failure(status: int, output: str) -> MeasureError:
    tail = "\n".join(output.splitlines()[-_TAIL_LINES:])
    problem = Problem(
        where="the process that builds the layers",
        found=f"exit status {status}",
        expected="0",
        remedy=f"Its last lines:\n{tail}",
    )
    return MeasureError("the layers cannot be measured", [problem])
