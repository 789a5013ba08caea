"""The commands of the tutorial run, in its order and on its own cluster file."""

import re
import shlex
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.unit.test_docs import ROOT, text_of
from zorse_megatron.cli.main import app

TUTORIAL = "docs/tutorial.md"
SCRIPTS = ROOT / "scripts" / "slurm"


def blocks(language: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```", text_of(TUTORIAL), re.DOTALL | re.MULTILINE)
    return [block for its_language, block in found if its_language == language]


def test_its_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (cluster,) = blocks("yaml")
    (tmp_path / "cluster.yaml").write_text(cluster)
    shutil.copytree(SCRIPTS, tmp_path, dirs_exist_ok=True)
    programs = []
    for line in "".join(blocks("")).splitlines():
        program, *words = shlex.split(line)
        programs.append(program)
        if program == "zorse":
            result = CliRunner().invoke(app, words)
            assert result.exit_code == 0, f"{line}\n{result.output}"
        else:
            assert program == "sbatch"
            assert (tmp_path / words[-1]).is_file(), line
    assert programs.count("zorse") >= 7
