import json

import pytest
from typer.testing import CliRunner

from tests.unit.test_profile_import import LAYERS, LINKS
from zorse_megatron.cli.main import app
from zorse_megatron.schema.profile.profile_json import load_profile


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run `zorse profile` in a directory with some tables."""
    monkeypatch.chdir(tmp_path)
    more = "".join(f"llama-7b,t4,512,float16,{size},{7 * size},{20 * size}\n" for size in (3, 4, 5))
    (tmp_path / "layers.csv").write_text(LAYERS.replace("2,14.0,42.0", "2,9.9,42.0") + more)
    (tmp_path / "links.csv").write_text(LINKS)
    (tmp_path / "own.csv").write_text(LAYERS.replace("llama-7b", "own"))
    (tmp_path / "own.yaml").write_text("name: own\npreset: llama-7b")
    (tmp_path / "bad.csv").write_text("a,b\n1,2\n")
    return lambda *arguments: CliRunner().invoke(app, ["profile", *arguments])


def test_import(run):
    result = run("import", "layers.csv", "links.csv", "--out", "p.json", "--origin", "lab")
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines() == [
        "p.json: 2 series of times on 2 kinds of GPU, 0 optimizer steps, 0 memory entries, 2 links",
        "note: 1 point will be replaced by the fitted curve; zorse profile show lists them",
    ]
    assert {source.origin for source in load_profile("p.json").sources} == {"lab"}


def test_import_json(run):
    result = run("import", "layers.csv", "--out", "p.json", "--json")
    answer = json.loads(result.stdout)
    assert answer["profile"] == "p.json"
    assert answer["gpu_kinds"]["T4"]["points"] == 5


def test_show(run):
    run("import", "layers.csv", "--out", "p.json")
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
    run("import", "layers.csv", "--out", "p.json")
    answer = json.loads(run("show", "p.json", "--json").stdout)
    (point,) = answer["not_believed"]
    assert (point["micro_batch_size"], point["measured_s"]) == (2, 0.0099)


def test_models_of_ones_own(run):
    result = run("import", "own.csv", "--out", "p.json")
    assert result.exit_code == 1
    assert '"own", whose shape is not known' in result.stderr
    assert run("import", "own.csv", "--out", "p.json", "--model", "own.yaml").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (["bad.csv"], "bad.csv: line 1: found columns a, b"),
        (["no.csv"], "no readable file"),
        (["layers.csv", "--model", "no.yaml"], "no readable file"),
        (["layers.csv", "layers.csv"], "2 entries with the name"),
    ],
)
def test_what_cannot_be_imported(run, tmp_path, arguments, found):
    result = run("import", *arguments, "--out", "p.json")
    assert result.exit_code == 1
    assert found in result.stderr
    assert not (tmp_path / "p.json").exists()


def test_an_unknown_dtype(run):
    result = run("import", "layers.csv", "--out", "p.json", "--dtype", "fp8")
    assert result.exit_code == 2
    assert "fp8" in result.output


def test_show_what_is_not_there(run):
    result = run("show", "p.json")
    assert result.exit_code == 1
    assert "no readable file" in result.stderr
