"""What `zorse discover` and `zorse profile measure` refuse of how they were started."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from zorse_megatron.cli.main import app


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        (
            {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"},
            ["the processes were not started as a job", "Put srun in front of the command"],
        ),
        ({"RANK": "0"}, ["WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"]),
    ],
)
def test_half_a_job_is_refused(
    environment: dict[str, str], said: list[str], tmp_path: Path
) -> None:
    words = ["discover", "--out", str(tmp_path / "cluster.yaml")]
    result = CliRunner().invoke(app, words, env=environment)
    assert result.exit_code == 1
    told = " ".join(result.output.split())
    assert all(each in told for each in said)
