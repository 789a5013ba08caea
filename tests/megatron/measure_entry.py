"""`zorse` as a rank on a pretended cluster: `ZORSE_TEST_NODES=2,2` puts two ranks on each of two
nodes, each with a kind of CPU of its own.

`ZORSE_TEST_DEATH=1:3`: rank 1 is killed when it is told of the third measurement.
Of other ranks the process that builds the layers is forked, and has Megatron imported.
"""

import fcntl
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import IO, Any, NoReturn

from zorse_megatron.emulate.fork_server import leave, run_as_main
from zorse_megatron.processes import end_with_parent

MESSAGE_BYTES = 1 << 17  # a flag file or an environment may be long
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


class ForkServer:
    """Forks what `measure.tasks` starts; `popen` is what it needs of `subprocess.Popen`.

    It is forked itself before this rank starts threads: a child of a rank with threads of gloo's
    would keep the locks that those held.
    """

    def __init__(self) -> None:
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork() == 0:
            self._ours.close()
            end_with_parent()
            serve(theirs)
            os._exit(0)
        theirs.close()

    def popen(
        self,
        words: Sequence[str],
        *,
        env: Mapping[str, str],
        stdout: IO[str],
        pass_fds: Sequence[int],
        **_others: Any,
    ) -> "Forked":
        request = {"words": list(words), "env": dict(env), "fds": [1, 2, *pass_fds]}
        output = stdout.fileno()
        socket.send_fds(self._ours, [json.dumps(request).encode()], [output, output, *pass_fds])
        return Forked(int(self._ours.recv(MESSAGE_BYTES)), self._ours)


class Forked:
    def __init__(self, pid: int, server: socket.socket) -> None:
        self.pid = pid
        self._server = server
        self._status: int | None = None

    def wait(self) -> int:
        if self._status is None:
            self._status = int(self._server.recv(MESSAGE_BYTES))
        return self._status

    def kill(self) -> None:
        if self._status is None:
            os.kill(self.pid, signal.SIGKILL)


def serve(client: socket.socket) -> None:
    """Fork one process after the other: answers its pid, and its exit status once it has ended."""
    while True:
        message, fds, _, _ = socket.recv_fds(client, MESSAGE_BYTES, 8)
        if not message:
            return
        request = json.loads(message)
        pid = os.fork()
        if pid == 0:
            client.close()
            end_with_parent()
            become(request, fds)
        for each in fds:
            os.close(each)
        client.send(str(pid).encode())
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        client.send(str(status).encode())


def become(request: Mapping[str, Any], fds: Sequence[int]) -> NoReturn:
    """Run the module of `python -m` words, with `fds` under the numbers that they have there."""
    # Above all of both, so that none is overwritten before it is copied.
    copies = [fcntl.fcntl(fd, fcntl.F_DUPFD, 100) for fd in fds]
    for copy, number in zip(copies, request["fds"], strict=True):
        os.dup2(copy, number)
    for each in copies:
        os.close(each)
    os.environ.clear()
    os.environ.update(request["env"])
    sys.argv = list(request["words"][2:])
    leave(run_as_main(sys.argv[0]))


def main() -> None:
    pretend()
    rank, _, when = os.environ.get("ZORSE_TEST_DEATH", "").partition(":")
    if rank != str(RANK):
        from zorse_megatron.measure import tasks

        vars(tasks)["subprocess"] = SimpleNamespace(Popen=ForkServer().popen, DEVNULL=None)
    else:
        from zorse_megatron.measure.on_ranks import cluster_discovery, profile_run

        for module, name in ((cluster_discovery, "discover"), (profile_run, "measure_profile")):
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
