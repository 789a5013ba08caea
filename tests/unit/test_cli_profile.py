import json

import pytest
from typer.testing import CliRunner

from scripts.import_profile import import_tables
from tests.unit.test_profile import LAYERS
from zorse_megatron.cli.main import app
from zorse_megatron.inputs.profile import save_profile


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run `zorse profile` in a directory with a profile."""
    monkeypatch.chdir(tmp_path)
    more = "".join(f"llama-7b,t4,512,float16,{size},{7 * size},{20 * size}\n" for size in (3, 4, 5))
    table = LAYERS.replace("2,14.0,42.0", "2,9.9,42.0") + more
    save_profile(import_tables({"layers.csv": table.encode()}).profile, tmp_path / "p.json")
    return lambda *arguments: CliRunner().invoke(app, ["profile", *arguments])


def test_show(run):
    result = run("show", "p.json")
    rows = [line.split("│")[1:-1] for line in result.stdout.splitlines() if "│" in line]
    assert [[cell.strip() for cell in row] for row in rows] == [
        ["T4", "llama-7b", "512", "float16", "1", "5"],
        ["A100-40", "llama-7b", "512", "float16", "1", "1"],
    ]
    assert result.stdout.splitlines()[-1] == (
        "replaced: T4, llama-7b at sequence length 512 in float16, tensor parallel 1, layer "
        "forward, micro-batch 2: 9.900 ms, used 14.583 ms"
    )


def test_show_json(run):
    answer = json.loads(run("show", "p.json", "--json").stdout)
    (point,) = answer["not_believed"]
    assert (point["micro_batch_size"], point["measured_s"]) == (2, 0.0099)


def test_show_what_is_not_there(run):
    result = run("show", "no.json")
    assert result.exit_code == 1
    assert "no readable file" in result.stderr
