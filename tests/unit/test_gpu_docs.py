"""docs/gpus.md has the table that the code makes.

After a change of it: `python -m tests.unit.test_gpu_docs` writes it anew.
"""

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

from scripts.gpu_table import support_table
from zorse_megatron.flags.installed_software import RankSoftware, with_gpu_flags
from zorse_megatron.flags.torch_builds import RELEASES

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "gpus.md"
TABLE = re.compile(r"(?<=test_gpu_docs`. -->\n).*?(?=\n\n)", re.DOTALL)


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
