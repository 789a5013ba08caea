"""`zorse` as a rank on a pretended cluster: `ZORSE_TEST_NODES=2,2` puts two ranks on each of two
nodes, each with a kind of CPU of its own.

`ZORSE_TEST_DEATH=1:3`: rank 1 is killed when it is told of the third measurement.
`ZORSE_TEST_FORKS=1`: the process that builds the layers is forked, and has Megatron imported.
"""

import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import IO, Any

RANK = int(os.environ["RANK"])


def pretend() -> None:
    first = 0
    for number, count in enumerate(map(int, os.environ["ZORSE_TEST_NODES"].split(","))):
        if first <= RANK < first + count:
            os.environ["ZORSE_NODE_NAME"] = f"node-{number}"
            os.environ["ZORSE_GPU_KIND"] = f"cpu-{number}"
            os.environ["LOCAL_RANK"] = str(RANK - first)
        first += count


def dying(show: Callable[[Any], None], when: int) -> Callable[[Any], None]:
    shown = []

    def run(progress: Any) -> None:
        shown.append(progress)
        if len(shown) == when:
            os.kill(os.getpid(), signal.SIGKILL)
        show(progress)

    return run


class Forked:
    """What `layer_process` needs of `subprocess.Popen`."""

    def __init__(
        self, words: Sequence[str], *, env: Mapping[str, str], stdout: IO[str], **_others: Any
    ) -> None:
        self.status: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            from tests.megatron.server import leave, run_as_main

            os.dup2(stdout.fileno(), 1)
            os.dup2(stdout.fileno(), 2)
            os.environ.clear()
            os.environ.update(env)
            sys.argv = list(words[2:])
            leave(run_as_main(words[2]))

    def wait(self) -> int:
        if self.status is None:
            self.status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.status

    def kill(self) -> None:
        if self.status is None:
            os.kill(self.pid, signal.SIGKILL)


def main() -> None:
    pretend()
    if "ZORSE_TEST_FORKS" in os.environ:
        from zorse_megatron.measure import layer_process

        vars(layer_process)["subprocess"] = SimpleNamespace(Popen=Forked, DEVNULL=None)
    rank, _, when = os.environ.get("ZORSE_TEST_DEATH", "").partition(":")
    if rank == str(RANK):
        from zorse_megatron.measure import discover, profile_run

        for module, name in ((discover, "discover"), (profile_run, "measure_profile")):
            measure = getattr(module, name)
            setattr(
                module,
                name,
                lambda place, wanted, show, measure=measure: measure(
                    place, wanted, dying(show, int(when))
                ),
            )
    from zorse_megatron.cli.main import app

    app(prog_name="zorse")


if __name__ == "__main__":
    main()
