"""The commands of docs/cli.md run, and print what the document shows.

After a change of what is printed: `python -m tests.unit.test_cli_docs` writes the outputs anew.
"""

import re
import shlex
from contextlib import chdir, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from typer.testing import CliRunner

from tests.printed import each_search_once, searching_little
from zorse_megatron.cli.main import app

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "cli.md"
BLOCK = re.compile(r"^( *)```\n\1(zorse [^\n]*)\n(.*?)^\1```", re.DOTALL | re.MULTILINE)
CLUSTER = re.compile(r"^```yaml\n(.*?)^```", re.DOTALL | re.MULTILINE)
# What a clock measured differs from run to run.
CLOCK = re.compile(r"\bin [\d.]+ s:")


def outputs():
    """Run all commands, in the order of the document and in one directory: (command, output)."""
    text = DOCUMENT.read_text(encoding="utf-8")
    with TemporaryDirectory() as directory, chdir(directory), each_search_once():
        tutorial = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
        Path("cluster.yaml").write_text(CLUSTER.search(tutorial)[1])
        for match in BLOCK.finditer(text):
            with nullcontext() if match[3] else searching_little():
                result = CliRunner().invoke(app, shlex.split(match[2])[1:])
            assert result.exit_code == 0, f"{match[2]}\n{result.output}"
            yield match, result.stdout


@pytest.mark.timeout(1200)
def test_commands_print_what_is_shown():
    compared = 0
    for match, output in outputs():
        if match[3]:
            assert CLOCK.sub("", output) == CLOCK.sub("", match[3]), match[2]
            compared += 1
    assert compared >= 5


def test_every_command_is_documented():
    text = DOCUMENT.read_text(encoding="utf-8")
    names = [command.name or command.callback.__name__ for command in app.registered_commands]
    for name in [*names, *(group.name for group in app.registered_groups)]:
        assert f"`zorse {name.replace('_', '-')}`" in text


def write_anew():
    """Put what the commands print now below each of them; indented blocks are left alone."""
    text = DOCUMENT.read_text(encoding="utf-8")
    for match, output in outputs():
        if not match[1] and "--timeline" not in match[2]:
            text = text.replace(match[0], f"```\n{match[2]}\n{output}```")
    DOCUMENT.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write_anew()
