"""What is told of a server that forks ranks and has gone."""

from pathlib import Path

import pytest

from zorse_megatron.emulate.rank_jobs import ForkClient, RankJob
from zorse_megatron.errors import RankFailure

GONE_AT_ITS_FIRST_JOB = """
import sys
print("{}", flush=True)
sys.stdin.readline()
sys.exit("no memory left")
"""


def test_a_server_that_has_gone_is_told_for_every_job(tmp_path: Path) -> None:
    (tmp_path / "server.py").write_text(GONE_AT_ITS_FIRST_JOB)
    client = ForkClient("server", working_directory=tmp_path)
    job = RankJob(name="x", arguments=(), world_size=1, limit_s=60.0, directory=tmp_path)
    for _ in range(2):
        with pytest.raises(RankFailure, match="found exit status 1") as failure:
            client.run(job)
        assert "no memory left" in str(failure.value)
    client.close()
