"""The documents of input files and of GPUs say what the code does.

After a change of the table of GPUs: `python -m tests.unit.test_input_docs` writes it anew.
"""

import dataclasses
import re
import tomllib
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
from packaging.requirements import Requirement
from typer.testing import CliRunner

from scripts.gpu_table import support_table
from zorse_megatron.cli.main import app
from zorse_megatron.errors import ClusterError
from zorse_megatron.flags.installed_software import RankSoftware, with_gpu_flags
from zorse_megatron.flags.torch_builds import RELEASES
from zorse_megatron.gpus.known_gpus import INSTANCES, canonical_kind
from zorse_megatron.inputs.cluster_file import ClusterFile
from zorse_megatron.inputs.cluster_yaml import parse_cluster
from zorse_megatron.inputs.model import MODELS
from zorse_megatron.inputs.profile import Profile, parse_profile
from zorse_megatron.plan.plan import Plan
from zorse_megatron.plan.plan_file import parse_plan

DOCS = Path(__file__).parents[2] / "docs"
ROOTS = {"cluster-file.md": ClusterFile, "profile-file.md": Profile, "plan-file.md": Plan}


def text_of(name):
    return (DOCS / name).read_text(encoding="utf-8")


def blocks(name, language):
    return re.findall(rf"^```{language}\n(.*?)^```", text_of(name), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("text", blocks("cluster-file.md", "yaml"))
def test_cluster_examples_load(text):
    assert parse_cluster(text.encode()).world_size >= 8


@pytest.mark.parametrize("text", blocks("profile-file.md", "json"))
def test_profile_examples_load(text):
    assert parse_profile(text.encode()).gpu_kinds() == ("L4",)


@pytest.mark.parametrize("text", blocks("plan-file.md", "json"))
def test_plan_examples_load(text):
    parse_plan(text.encode())


def test_there_are_examples():
    languages = dict(zip(ROOTS, ("yaml", "json", "json"), strict=True))
    counts = [len(blocks(name, kind)) for name, kind in languages.items()]
    assert counts == [3, 1, 1]


def test_outputs_of_check_are_as_shown(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    good, *_ = blocks("plan-file.md", "json")
    spoilt = good.replace("[6, 9]", "[6, 8]")
    spoilt = spoilt.replace('"num_microbatches": 8', '"num_microbatches": 7')
    shown = re.findall(r"```\n(plan\.json.*?)```", text_of("plan-file.md"), re.DOTALL)
    for text, output in zip((good, spoilt), shown, strict=True):
        Path("plan.json").write_text(text, encoding="utf-8")
        assert CliRunner().invoke(app, ["check", "plan.json"]).stdout == output


def test_what_the_example_says_of_ranks():
    found = parse_cluster(blocks("cluster-file.md", "yaml")[0].encode())
    assert found.gpu_kinds == ("A6000",) * 4 + ("V100-16",) * 4


def test_problems_are_as_shown():
    (shown,) = re.findall(r"^```\n(cluster\.yaml.*?)^```", text_of("cluster-file.md"), re.S | re.M)
    spoilt = "nodes:\n  - {gpus: 8 x A1000-40}\n  - {gpus: 8 x T4}\n"
    with pytest.raises(ClusterError) as caught:
        parse_cluster(spoilt.encode(), source="cluster.yaml")
    assert str(caught.value) + "\n" == shown


def documented_fields(name):
    """The names in the first column of the table under each heading, and whether required."""
    tables = {}
    for section in re.split(r"^### ", text_of(name), flags=re.MULTILINE)[1:]:
        heading = section.splitlines()[0]
        fields = re.findall(r"^\| `(\w+)` \|.*?\| (yes|no) \|", section, re.MULTILINE)
        tables |= dict.fromkeys(re.findall(r"`(.+?)`", heading) or [heading], fields)
    return tables


def real_fields(root):
    tables = {}

    def inner_class(hint):
        if dataclasses.is_dataclass(hint):
            return hint, False
        for part in get_args(hint):
            found, is_list = inner_class(part)
            if found:
                return found, is_list or getattr(hint, "__origin__", None) is tuple
        return None, False

    def visit(owner, path):
        rows = []
        for field in dataclasses.fields(owner):
            default = (field.default, field.default_factory)
            required = default == (dataclasses.MISSING, dataclasses.MISSING)
            rows.append((field.name, "yes" if required else "no"))
            inner, is_list = inner_class(get_type_hints(owner)[field.name])
            if inner:
                visit(inner, f"{path}{field.name}" + ("[]" if is_list else "") + ".")
        tables[path.removesuffix(".") or f"{owner.__name__} (top level)"] = rows

    visit(root, "")
    return tables


@pytest.mark.parametrize("name", ROOTS)
def test_every_field_is_documented_where_it_belongs(name):
    assert documented_fields(name) == real_fields(ROOTS[name])


def test_spellings_are_as_said():
    assert {canonical_kind(name) for name in ("a100-40", "A100 40", "a100x40")} == {"A100-40"}


@pytest.mark.parametrize(
    ("name", "heading", "known"),
    [
        ("cluster-file.md", "## Cloud instances", INSTANCES),
        ("cli.md", "### Well-known models", MODELS),
    ],
)
def test_lists_are_complete(name, heading, known):
    section = text_of(name).split(heading)[1].split("\n## ")[0]
    assert set(re.findall(r"`([\w.-]+)`", section)) - {"schema"} >= set(known)


def test_commands_exist():
    for command in set(
        re.findall(r"^zorse (profile \w+)", text_of("profile-file.md"), re.MULTILINE)
    ):
        assert CliRunner().invoke(app, [*command.split(), "--help"]).exit_code == 0


# GPUs.

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "gpus.md"
TABLE = re.compile(r"(?<=test_input_docs`. -->\n).*?(?=\n\n)", re.DOTALL)


def test_the_table_is_what_the_code_says():
    (found,) = TABLE.findall(DOCUMENT.read_text(encoding="utf-8"))
    assert found == support_table()


def extras():
    """Distribution -> the versions that pyproject.toml asks for with an extra."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    words = [word for extra in project["optional-dependencies"].values() for word in extra]
    return {each.name: each.specifier for each in map(Requirement, words)}


def test_pip_brings_the_torch_that_is_tested():
    """One range, in pyproject.toml; its newest is the one that the document says is tested."""
    asked = extras()["torch"]
    assert all(f"{release}.0" in asked for release in RELEASES)
    major, newest = map(int, RELEASES[0].split("."))
    assert f"{major}.{newest}.99" in asked and f"{major}.{newest + 1}.0" not in asked
    _, oldest = map(int, RELEASES[-1].split("."))
    assert f"{major}.{oldest - 1}.99" not in asked
    assert re.search(r"\btorch\b *[=<>~]", (ROOT / "Makefile").read_text()) is None
    for path in ("README.md", "docs/gpus.md"):
        named = re.findall(r"torch==([\d.]+)\.\*", (ROOT / path).read_text(encoding="utf-8"))
        assert set(named) == {RELEASES[0]}, path


def test_the_versions_that_are_tested_are_in_the_range():
    text = (ROOT / "docs" / "limits.md").read_text(encoding="utf-8").partition("## Versions")[2]
    tested = dict(re.findall(r"^\| ([\w-]+) \| .* \| (\d+\.\d+\.\d+)", text, re.MULTILINE))
    assert tested.keys() == {"megatron-core", "torch", "Triton"}
    asked = extras()
    assert tested["megatron-core"] in asked["megatron-core"]
    assert tested["torch"].startswith(f"{RELEASES[0]}.")


def test_every_flag_that_is_added_is_documented():
    bare = RankSoftware(
        rank=0, node="", gpu=None, torch="", archs=(), nccl=None,
        transformer_engine=None, flash_attention=None, extensions=(),
    )  # fmt: skip
    text = DOCUMENT.read_text(encoding="utf-8")
    for each in with_gpu_flags([], bare).added:
        assert f"`{' '.join(each.words)}`" in text


def write_anew():
    text = DOCUMENT.read_text(encoding="utf-8")
    DOCUMENT.write_text(TABLE.sub(support_table(), text), encoding="utf-8")


if __name__ == "__main__":
    write_anew()
