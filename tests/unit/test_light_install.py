"""The light install plans: what it lacks is said with the extra's name, never by a traceback."""

import ast
import importlib.metadata
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from zorse_megatron import extras
from zorse_megatron.extras import MODULES, PACKAGE, MissingExtra

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
# Distribution -> the modules that it brings, where they are called otherwise.
BRINGS = {
    "PyYAML": {"yaml"},
    "pydantic": {"pydantic", "pydantic_core"},
    "megatron-core": {"megatron", "packaging"},  # packaging is a requirement of its own
    "torch": {"torch", "triton"},
    "nvidia-ml-py": {"pynvml"},
}
CLUSTER = "nodes:\n  - {name: a, gpus: 2 x A6000, nics: 100 Gb/s}\n"
# As where they are not installed: no import finds them, in this process and those that it starts.
BLOCK = f"""
import importlib.abc, sys
ABSENT = {{name for names in {dict(MODULES)!r}.values() for name in names}} | {{"triton", "pynvml"}}
class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ABSENT:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
"""
# All commands in one process: name -> [exit code, stdout, stderr].
ZORSE = (
    BLOCK
    + """
import json
from typer.testing import CliRunner
from zorse_megatron.cli.main import app
answers = {}
for name, arguments in json.loads(sys.argv[1]).items():
    result = CliRunner().invoke(app, arguments)
    answers[name] = [result.exit_code, result.stdout, result.stderr]
print(json.dumps(answers))
"""
)
MODULE = BLOCK + (
    "import runpy\nname = sys.argv[1]\ndel sys.argv[1]\n"
    "runpy.run_module(name, run_name='__main__', alter_sys=True)\n"
)


FLAGS = (
    "--num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 "
    "--max-position-embeddings 2048 --vocab-size 50304 --global-batch-size 4 "
    "--untie-embeddings-and-output-weights --eval-interval 1000"
)
GIVEN = "plan.json --cluster cluster.yaml --model gpt-1.3b"
PLANS = {
    "plan": "plan --cluster cluster.yaml --model gpt-1.3b --global-batch-size 4 --max-tp 1 "
    "--use-all --out plan.json",
    "check": "check plan.json cluster.yaml",
    "explain": f"explain {GIVEN} --trace trace.json",
    "compare": "compare --simulated --strategy cephalo --cluster cluster.yaml --model gpt-1.3b "
    "--global-batch-size 4",
    "launch": f"launch plan.json --cluster cluster.yaml --torchrun -- {FLAGS}",
}
PICTURES = {"--timeline": f"explain {GIVEN} --timeline timeline.png"}
TRAINS = {
    "zorse emulate": f"emulate {GIVEN}",
    "discover": "discover",
    "profile": f"profile measure --cluster cluster.yaml -- {FLAGS}",
}
BOTH = {
    "zorse compare": "compare --cluster cluster.yaml --model gpt-1.3b --global-batch-size 4 --out c"
}
JSON = f"emulate {GIVEN} --json"


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """What each command answers without the extras, in a directory with a cluster file."""
    directory = tmp_path_factory.mktemp("light")
    (directory / "cluster.yaml").write_text(CLUSTER, encoding="utf-8")
    commands = PLANS | PICTURES | TRAINS | BOTH | {"json": JSON}
    words = json.dumps({name: command.split() for name, command in commands.items()})
    ran = run(directory, ZORSE, words)
    assert ran.returncode == 0, ran.stderr
    assert not list(directory.glob("*.png"))
    return json.loads(ran.stdout)


def run(directory, script, *arguments):
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=directory, timeout=120
    )


@pytest.mark.parametrize("name", PLANS)
def test_plans_and_judges_plans(answers, name):
    status, _, errors = answers[name]
    assert status == 0, errors


@pytest.mark.parametrize("option", PICTURES)
def test_pictures_ask_for_plots(answers, option):
    assert_asks(*answers[option], extras="plots", what=option)


@pytest.mark.parametrize("what", TRAINS)
def test_training_asks_for_train(answers, what):
    assert_asks(*answers[what], extras="train", what=what)


@pytest.mark.parametrize("what", BOTH)
def test_comparing_asks_for_both(answers, what):
    assert_asks(*answers[what], extras="train,plots", what=what)


def test_json_asks_too(answers):
    _, stdout, _ = answers["json"]
    (problem,) = json.loads(stdout)["problems"]
    assert "pip install 'zorse-megatron[train]'" in problem["remedy"]


def test_modules_ask(tmp_path):
    ran = run(tmp_path, MODULE, "zorse_megatron.pretrain", *FLAGS.split())
    assert_asks(ran.returncode, ran.stdout, ran.stderr, extras="train", what="training", status=2)
    ran = run(tmp_path, MODULE, "zorse_megatron.demo")
    assert_asks(ran.returncode, ran.stdout, ran.stderr, extras="train,plots", what="the demo")


def test_pip_knows_what_is_asked_for_without_an_index():
    pip = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-index", "--no-deps"]
    ran = subprocess.run(
        [*pip, f"{PACKAGE}[plots]"], capture_output=True, text=True, check=False, timeout=60
    )
    assert ran.returncode == 0, ran.stderr
    assert f"Requirement already satisfied: {PACKAGE}[plots]" in ran.stdout


def test_a_checkout_that_is_not_installed_asks_for_its_directory(monkeypatch):
    def unknown(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", unknown)
    monkeypatch.setattr(extras, "_is_there", lambda module: module != "matplotlib")
    with pytest.raises(MissingExtra, match=re.escape(f"pip install '{ROOT}[plots]'")):
        extras.refuse_without("plots", what="a picture")


def assert_asks(code, stdout, stderr, *, extras, what, status=1):
    said = stdout + stderr
    assert code == status, said
    assert f"pip install 'zorse-megatron[{extras}]'" in said
    assert what in said and "Traceback" not in said


def test_what_is_imported_is_required():
    """Planning imports what the light install brings; the extras bring all else."""
    extras = PROJECT["project"]["optional-dependencies"]
    light = _brought(PROJECT["project"]["dependencies"])
    by_extra = {extra: _brought(extras[extra]) for extra in ("train", "gpu", "plots", "muon")}
    for extra, modules in MODULES.items():
        assert set(modules) <= by_extra[extra]
    imported = {}
    for path in sorted((ROOT / "zorse_megatron").rglob("*.py")):
        for name in _imported(path):
            if name not in sys.stdlib_module_names and name != "zorse_megatron":
                imported.setdefault(name, set()).add(path.relative_to(ROOT).parts[1])
    assert set(imported) <= light.union(*by_extra.values())
    used = {name for name, parts in imported.items() if parts & {"planner", "inputs", "cli"}}
    assert used <= light
    # Whatever is required is used.
    for name in light - {"pydantic_core"}:
        assert name in imported, name


def test_one_python_is_the_oldest():
    oldest = re.fullmatch(r">=3\.(\d+)", PROJECT["project"]["requires-python"])[1]
    tools = PROJECT["tool"]
    assert tools["ruff"]["target-version"] == f"py3{oldest}"
    assert tools["mypy"]["python_version"] == f"3.{oldest}"
    assert f"Programming Language :: Python :: 3.{oldest}" in PROJECT["project"]["classifiers"]


def _brought(requirements):
    names = [re.match(r"[A-Za-z0-9_-]+", each)[0] for each in requirements]
    return set().union(*(BRINGS.get(name, {name.replace("-", "_")}) for name in names))


def _imported(path):
    """Top-level modules that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "").partition(".")[0]
