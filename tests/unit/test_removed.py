"""Commands and options that were removed: the error says what to do now, with what there is."""

import json
import re

import pytest
from typer.testing import CliRunner

from tests.unit.test_cli import COMMANDS, options
from zorse_megatron.cli.command_group import REMOVED
from zorse_megatron.cli.main import app


@pytest.mark.parametrize(("name", "way"), REMOVED.items(), ids=REMOVED)
def test_the_way_now_is_named(name: str, way: str) -> None:
    words = name.split()
    given = (
        [words, [*words[:-1], f"{words[-1]}=3"]] if "--" in name else [words, [*words, "--help"]]
    )
    for each in given:
        result = CliRunner().invoke(app, [*each, "--json"])
        assert result.exit_code == 2
        (problem,) = json.loads(result.stdout)["problems"]
        assert (problem["where"], problem["remedy"]) == (f"zorse {name}", way)
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2
    assert f"zorse {name}: found" in " ".join(result.stderr.split())


def test_what_is_to_be_done_now_is_there() -> None:
    known = set().union(*map(options, COMMANDS.values()))
    for way in REMOVED.values():
        for words in re.findall(r"zorse ((?:[a-z-]+ ?)+)", way):
            assert any(words.startswith(" ".join(each)) for each in COMMANDS), way
        assert set(re.findall(r"--[\w-]+", way)) <= known, way


def test_other_words_are_unknown_as_before() -> None:
    assert "No such command 'folow'" in CliRunner().invoke(app, ["folow"]).stderr
    assert "No such option" in CliRunner().invoke(app, ["move", "--follow", "x"]).stderr
