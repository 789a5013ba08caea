"""Commands and options that are not there, or not any more, are unknown by name."""

from typer.testing import CliRunner

from tests.unit.test_cli import COMMANDS
from zorse_megatron.cli.main import app


def test_unknown_words_are_named():
    assert ("replan",) not in COMMANDS
    assert "No such command 'replan'" in CliRunner().invoke(app, ["replan"]).stderr
    assert "No such option" in CliRunner().invoke(app, ["move", "--follow", "x"]).stderr
