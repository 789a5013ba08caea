"""A command that takes long says what it does, on stderr, where somebody may read it."""

import io
import time

import pytest
from rich.console import Console

from zorse_megatron.cli import console as progress
from zorse_megatron.cli.console import progress_shown
from zorse_megatron.log import Progress


@pytest.fixture
def stderr(monkeypatch):
    """What is written to a stderr that is no terminal; a line is due every 20 ms."""
    text = io.StringIO()
    monkeypatch.setattr(progress, "QUIET_S", 0.02)
    monkeypatch.setattr(progress, "Console", lambda stderr: Console(file=text))
    return text


def wait_for(text, word):
    deadline_s = time.monotonic() + 10
    while word not in text.getvalue():
        assert time.monotonic() < deadline_s, text.getvalue()
        time.sleep(0.005)


def test_a_log_gets_plain_lines_of_what_is_done(stderr):
    with progress_shown("simulating", wanted=True) as tell:
        wait_for(stderr, "zorse: simulating (0 s)\n")
        tell("drawing [1/2]")
        wait_for(stderr, "zorse: drawing [1/2] (0 s)\n")
    with progress_shown("searching", wanted=True, title="cephalo") as tell:
        tell(Progress(phase="simulating", done=3, total=9))
        wait_for(stderr, "zorse: cephalo: simulating 3 of 9 (0 s)\n")
    assert "\x1b" not in stderr.getvalue()


@pytest.mark.parametrize(("quiet_s", "wanted"), [(60.0, True), (0.02, False)])
def test_what_is_fast_says_nothing_and_json_is_not_disturbed(stderr, monkeypatch, quiet_s, wanted):
    monkeypatch.setattr(progress, "QUIET_S", quiet_s)
    with progress_shown("simulating", wanted=wanted) as tell:
        tell("drawing")
        time.sleep(0.1)
    assert stderr.getvalue() == ""


def test_a_terminal_shows_what_is_done(monkeypatch):
    text = io.StringIO()
    monkeypatch.setattr(
        progress, "Console", lambda stderr: Console(file=text, force_terminal=True, no_color=True)
    )
    with progress_shown("simulating", wanted=True) as tell:
        tell("drawing")
    assert "drawing" in text.getvalue()
    with progress_shown("simulating", wanted=True) as tell:
        tell(Progress(phase="searching", done=3, total=9))
    assert "searching 3 of 9" in text.getvalue()
