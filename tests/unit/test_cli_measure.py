"""What `zorse discover` and `zorse profile measure` refuse before they start to measure."""

from pathlib import Path

from typer.testing import CliRunner

from tests.unit.cli_samples import FLAGS
from zorse_megatron.cli.main import app


def refusal(*words: str, env: dict[str, str] | None = None) -> str:
    result = CliRunner().invoke(app, list(words), env=env)
    assert result.exit_code == 1
    return " ".join(result.output.split())


def test_a_training_command_is_needed() -> None:
    found = refusal("profile", "measure", "--cluster", "cluster.yaml")
    assert "found no training command" in found


def test_a_script_must_be_there(tmp_path: Path) -> None:
    words = ("profile", "measure", "--cluster", "c.yaml", "--", str(tmp_path / "train.py"), *FLAGS)
    assert "train.py: found no such file; expected your training script" in refusal(*words)


def test_a_model_that_makes_no_sense_is_refused() -> None:
    flags = [*FLAGS, "--hidden-size", "many"]
    found = refusal("profile", "measure", "--cluster", "cluster.yaml", "--", *flags)
    assert '--hidden-size: found "many"' in found


def test_results_must_have_a_place(tmp_path: Path) -> None:
    output = ("--out", str(tmp_path / "no" / "such" / "file"))
    assert "found no directory" in refusal("discover", *output)
    words = ("profile", "measure", "--cluster", "cluster.yaml", *output, "--", *FLAGS)
    assert "found no directory" in refusal(*words)


def test_one_process_of_a_job_of_many_is_told_of_srun(tmp_path: Path) -> None:
    shell = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"}
    found = refusal("discover", "--out", str(tmp_path / "cluster.yaml"), env=shell)
    assert "the processes were not started as a job" in found
    assert "Put srun in front of the command" in found


def test_half_an_environment_is_refused_with_every_variable(tmp_path: Path) -> None:
    found = refusal("discover", "--out", str(tmp_path / "cluster.yaml"), env={"RANK": "0"})
    for name in ("WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        assert name in found
