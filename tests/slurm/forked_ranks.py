"""Has the ranks of a job under Slurm forked by a process that has Megatron imported.

Each import of Megatron takes seconds of CPU, and a job that is killed and stopped starts all ranks
three times. The job's interpreter (`conftest`) runs this file where it is to run the module, or the
script, of the ranks: it hands over its environment, folder and output to `serve`, which forks the
rank, passes on signals to it and ends as it does. One rank of `test_unmodified_megatron...`, of
`test_launched_stock` and of the tutorial's job is started as Slurm or torchrun does.
"""

import contextlib
import fcntl
import json
import os
import select
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

VARIABLE = "ZORSE_TEST_FORKS"
"""The socket at which `serve` listens; it ends when that file is gone."""
ENTRY = "tests.slurm.forked_ranks"
_FORWARDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGABRT)
REPOSITORY = Path(__file__).parents[2]
_POLL_S = 0.05
_MESSAGE_BYTES = 1 << 17
_MOST_FILES = 64
_ASIDE = 512


def stand_for_rank() -> NoReturn:
    """`forked_ranks.py PYTHONS_WORDS`: end as the rank that is forked does."""
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server.connect(os.environ[VARIABLE])
    words = [word for word in sys.argv[1:] if word != "-u"]
    files = [number for number in range(_MOST_FILES) if _is_inherited(number)]
    request = {"words": words, "environment": dict(os.environ), "directory": os.getcwd()}
    signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
    socket.send_fds(server, [json.dumps(request | {"files": files}).encode()], files)
    rank = int(server.recv(_MESSAGE_BYTES))
    for number in _FORWARDED:
        signal.signal(number, lambda number, _frame: os.kill(rank, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
    status = int(server.recv(_MESSAGE_BYTES))
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    sys.exit(status)


def _is_inherited(number: int) -> bool:
    try:
        return os.get_inheritable(number)
    except OSError:  # it is not open
        return False


def serve(path: str) -> None:
    """Fork what those ask for that stand for the ranks; what is left when one has gone is ended."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(path)
    listener.listen()
    standing: dict[int, socket.socket] = {}
    while Path(path).exists():
        ready, _, _ = select.select([listener, *standing.values()], [], [], _POLL_S)
        gone = [rank for rank, each in standing.items() if each in ready]
        for rank in gone:
            _end(rank)
        if listener in ready:
            connection, _ = listener.accept()
            message, files, *_ = socket.recv_fds(connection, _MESSAGE_BYTES, _MOST_FILES)
            rank = os.fork()
            if rank == 0:
                _become_rank(json.loads(message), files)
            standing[rank] = connection
            for number in files:
                os.close(number)
            connection.send(str(rank).encode())
        for rank in list(standing):
            ended, status = os.waitpid(rank, os.WNOHANG)
            if ended:
                _end(rank)  # what it has left behind
                with contextlib.suppress(OSError), standing.pop(rank) as connection:
                    connection.send(str(os.waitstatus_to_exitcode(status)).encode())


def _end(rank: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(rank, signal.SIGKILL)


def _become_rank(request: dict, files: Sequence[int]) -> NoReturn:
    import torch

    from zorse_megatron.emulate.fork_server import leave, run_as_main
    from zorse_megatron.processes import end_with_parent

    os.setpgid(0, 0)
    end_with_parent()
    aside = [fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, _ASIDE) for number in files]
    os.closerange(3, _ASIDE)  # the sockets of others
    for target, number in zip(request["files"], aside, strict=True):
        os.dup2(number, target)
        os.close(number)
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.executable = os.environ.get("PYTHON_EXEC", sys.executable)
    os.chdir(request["directory"])
    torch.set_num_threads(1)
    module, *sys.argv[1:] = request["words"]
    if module == "-m":
        module, *sys.argv[1:] = sys.argv[1:]
    else:  # a script of this repository
        module = ".".join(Path(module).relative_to(REPOSITORY).with_suffix("").parts)
    sys.argv[0] = module
    leave(run_as_main(module))


@contextlib.contextmanager
def forking_server() -> Iterator[dict[str, str]]:
    """`serve`, on the server of this process's ranks, which meanwhile runs no other job.

    Yields the variable that a job is submitted with.
    """
    from tests.megatron.launch import default_server

    with tempfile.TemporaryDirectory(prefix="zorse-") as directory:
        path, options = Path(directory, "socket"), {"entry": ENTRY, "timeout_s": 3600.0}
        job = threading.Thread(
            target=default_server().run_ranks, args=([str(path)], 1), kwargs=options
        )
        job.start()
        try:
            yield {VARIABLE: str(path)}
        finally:
            path.unlink()
            job.join()


if __name__ == "__main__":
    if __package__:
        serve(sys.argv[1])
    stand_for_rank()
