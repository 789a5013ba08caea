"""Fixtures of the end-to-end tests."""

from pathlib import Path

import pytest

from tests.megatron.launch import MegatronServer, default_server
from tests.shared import directory_of

CORPUS_BYTES = 400_000


@pytest.fixture(scope="session")
def megatron_server() -> MegatronServer:
    """A process with Megatron imported that forks the ranks of a job."""
    return default_server()


@pytest.fixture(scope="session")
def corpus_prefix(megatron_server: MegatronServer) -> Path:
    """The standard library's sources as byte tokens, for `--data-path`.

    Written by a rank: Megatron must not be imported in the test process before CPU mode.
    """
    entry = "zorse_megatron.adapter.corpus"
    return _text("stdlib", megatron_server, entry, str(CORPUS_BYTES))


@pytest.fixture(scope="session")
def corpus(megatron_server: MegatronServer) -> Path:
    """Text whose samples differ in how many tokens count, with --eod-mask-loss."""
    return _text("masked", megatron_server, "tests.megatron.masked_corpus_entry")


def _text(name: str, server: MegatronServer, entry: str, *more: str) -> Path:
    def write(directory: Path) -> None:
        argv = [str(directory / "text"), *more]
        server.run_ranks(argv, 1, entry=entry, timeout_s=60).check()

    return directory_of(name, write) / "text"
