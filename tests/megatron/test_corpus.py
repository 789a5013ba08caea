"""The demo corpus: real text, the same every time, readable by stock."""

import json
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from tests.megatron.launch import MegatronServer
from tests.megatron.small_run import TOKENIZER_FLAGS
from zorse_megatron.errors import RankFailure

MAX_BYTES = 50_000


def write(server: MegatronServer, prefix: Path, max_bytes: int = MAX_BYTES) -> dict[str, int]:
    result = server.run_ranks(
        [str(prefix), str(max_bytes)], 1, entry="zorse_megatron.adapter.corpus", timeout_s=60
    ).check()
    return dict(json.loads(result.outputs[0].splitlines()[-1]))


def test_holds_the_sources_up_to_the_limit(megatron_server: MegatronServer, tmp_path: Path) -> None:
    info = write(megatron_server, tmp_path / "corpus")
    tokens = np.fromfile(tmp_path / "corpus.bin", dtype=np.uint16)
    assert len(tokens) == info["tokens"] == MAX_BYTES + info["documents"]
    assert (tokens == 0).sum() == info["documents"] > 1
    first = bytes(tokens[: np.flatnonzero(tokens == 0)[0]].astype(np.uint8))
    assert first == Path(sysconfig.get_path("stdlib"), "__future__.py").read_bytes()


def test_is_the_same_every_time(megatron_server: MegatronServer, tmp_path: Path) -> None:
    write(megatron_server, tmp_path / "one")
    write(megatron_server, tmp_path / "two")
    for suffix in ("bin", "idx"):
        one, two = ((tmp_path / f"{name}.{suffix}").read_bytes() for name in ("one", "two"))
        assert one == two


def test_stock_reads_the_documents(megatron_server: MegatronServer, tmp_path: Path) -> None:
    info = write(megatron_server, tmp_path / "corpus")
    result = megatron_server.run_ranks(
        [str(tmp_path / "corpus")], 1, entry="tests.megatron.read_corpus_entry", timeout_s=60
    ).check()
    read = json.loads(result.outputs[0].splitlines()[-1])
    assert read["documents"] == info["documents"]
    assert read["tokens"] == info["tokens"]
    assert read["last_tokens"] == [0] * info["documents"]
    assert read["tokenizer_flags"] == list(TOKENIZER_FLAGS)


def test_refuses_bytes_that_end_documents(megatron_server: MegatronServer, tmp_path: Path) -> None:
    with pytest.raises(RankFailure, match="null byte at offset 3"):
        megatron_server.run_ranks(
            [str(tmp_path / "corpus"), "null"],
            1,
            entry="tests.megatron.read_corpus_entry",
            timeout_s=60,
        ).check()
