"""Fixtures of the end-to-end tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.megatron.launch import MegatronServer, default_server

CORPUS_BYTES = 400_000


@pytest.fixture(scope="session")
def megatron_server() -> MegatronServer:
    """A process with Megatron imported that forks the ranks of a job."""
    return default_server()


@pytest.fixture(scope="session")
def corpus_prefix(
    megatron_server: MegatronServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """The standard library's sources as byte tokens, for `--data-path`.

    Written by a rank: Megatron must not be imported in the test process before CPU mode.
    """
    prefix = tmp_path_factory.mktemp("corpus") / "stdlib"
    megatron_server.run_ranks(
        [str(prefix), str(CORPUS_BYTES)],
        1,
        entry="tests.megatron.corpus_entry",
        timeout_s=60,
    ).check()
    yield prefix


@pytest.fixture(scope="session")
def corpus(megatron_server: MegatronServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text whose samples differ in how many tokens count, with --eod-mask-loss."""
    prefix = tmp_path_factory.mktemp("masked") / "text"
    megatron_server.run_ranks(
        [str(prefix)], 1, entry="tests.megatron.masked_corpus_entry", timeout_s=60
    ).check()
    return prefix
