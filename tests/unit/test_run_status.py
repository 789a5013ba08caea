"""Who is slow, since when; and the command that shows it."""

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from tests.unit.made_plans import plan_of, replica
from zorse_megatron.cli.main import app
from zorse_megatron.errors import PlanError, Problem
from zorse_megatron.files.read_write import write_text
from zorse_megatron.inputs.status import STATUS_NAME, LinkStatus, Move, dump_status, load_status
from zorse_megatron.live.run_status import IterationTimes, RunStatus
from zorse_megatron.plan.plan import (
    ClusterFingerprint,
    Plan,
    Predictions,
)

KINDS = ("A", "A", "B", "B")
PLANNED_S = (0.1, 0.1, 0.2, 0.2)
PLAN = plan_of(
    [replica(rank, count=16) for rank in range(4)],
    cluster=ClusterFingerprint(gpu_kinds=KINDS),
    predictions=Predictions(iteration_s=4.0, micro_batch_s=PLANNED_S),
)


def _run(status: RunStatus, numbers: range, factors: tuple[float, ...]) -> list[str]:
    """What the log says of iterations in which ranks are so many times as slow as planned."""
    said = []
    for number in numbers:
        status.take(
            tuple(
                IterationTimes(
                    number=number,
                    micro_batch_s=planned * factor,
                    compute_s=16 * planned * factor,
                    waited_s=0.5,
                    update_s=0.25,
                    iteration_s=5.0,
                )
                for planned, factor in zip(PLANNED_S, factors, strict=True)
            )
        )
        said += status.news()
    return said


def _status(plan: Plan = PLAN) -> RunStatus:
    return RunStatus(plan=plan, tokens_per_iteration=640, first_iteration=100)


def test_the_log_says_once_who_becomes_slow_and_who_no_longer_is() -> None:
    status = _status()
    even = (1.0, 1.0, 1.0, 1.0)
    assert _run(status, range(10), even) == []
    assert _run(status, range(10, 20), (1.0, 1.5, 1.0, 1.0)) == [
        "rank 1 (A) takes 1.50 times as long as planned for a micro-batch, since iteration 111"
    ]
    assert _run(status, range(20, 30), even) == ["rank 1 (A) is as fast as planned again"]


def test_what_the_file_says(tmp_path: Path) -> None:
    status = _status()
    _run(status, range(10), (1.0, 1.5, 1.0, 1.0))
    status.change(10, ((18, 12, 17, 17),))
    _run(status, range(10, 15), (1.0, 1.5, 1.0, 1.0))
    now = status.now(written_s=1.7e9)
    (tmp_path / STATUS_NAME).write_text(dump_status(now))
    assert load_status(tmp_path) == now
    assert (now.iteration, now.iteration_s, now.tokens_per_s) == (115, 5.0, 128.0)
    second = now.ranks[1]
    assert second.slowdown == pytest.approx(1.5) and second.since == 102
    assert (second.kind, second.num_microbatches) == ("A", 12)
    assert second.shares.waited == pytest.approx(0.1)

    shown = CliRunner().invoke(app, ["status", str(tmp_path)])
    assert shown.exit_code == 0
    assert "80 % of the plan's speed" in shown.output and "1.50 x" in shown.output
    assert "replicas since iteration 111: 18,12,17,17" in shown.output
    as_json = CliRunner().invoke(app, ["status", str(tmp_path), "--json"])
    assert json.loads(as_json.output)["ranks"][1]["since"] == 102


def test_moves_and_links_are_shown(tmp_path: Path) -> None:
    status = _status()
    _run(status, range(5), (1.0, 1.0, 1.0, 1.0))
    status.moves += [Move(iteration=103, plan="ab", refused="no room"), Move(iteration=104)]
    status.ended = True
    links = tuple(
        LinkStatus(ranks=(0, rank), num_bytes=2**20, seconds=rank * 1e-3, messages=3)
        for rank in range(1, 11)
    )
    now = dataclasses.replace(status.now(written_s=1.7e9), links=links)
    (tmp_path / STATUS_NAME).write_text(dump_status(now))
    assert load_status(tmp_path) == now
    shown = CliRunner().invoke(app, ["status", str(tmp_path)]).output
    assert "iteration 105, the training has ended" in shown
    assert "plan ab was asked for after iteration 103: refused: no room" in shown
    assert "plan that could not be read was asked for after iteration 104" in shown
    assert "ranks 0 and 10: a message of 1,048,576 bytes takes 10 ms" in shown
    assert "ranks 0 and 2:" not in shown and "ranks 0 and 3:" in shown


def test_without_times_in_the_plan_the_first_iterations_count() -> None:
    """What is slow from the start on is then not seen."""
    status = _status(dataclasses.replace(PLAN, predictions=None))
    assert _run(status, range(10), (1.0, 1.5, 1.0, 1.0)) == []
    (line,) = _run(status, range(10, 20), (1.0, 1.5, 1.2, 1.0))
    assert line.startswith("rank 2 (B) takes 1.20 times as long as at first")


@pytest.mark.parametrize("text", ["{}", "[", '{"schema_version": 2}'])
def test_a_status_that_cannot_be_used(text: str, tmp_path: Path) -> None:
    (tmp_path / STATUS_NAME).write_text(text)
    result = CliRunner().invoke(app, ["status", str(tmp_path)])
    assert result.exit_code == 1 and "status.json" in result.output


_TEXTS = st.text(st.characters(), max_size=60)
_PROBLEMS = st.builds(Problem, where=_TEXTS, found=_TEXTS, expected=_TEXTS, remedy=_TEXTS)
_ERRORS = st.builds(PlanError, _TEXTS, st.lists(_PROBLEMS, min_size=1, max_size=3))
_SECONDS = st.just(0.0) | st.floats(1e-9, 1e6)
_TIMES = st.builds(
    IterationTimes,
    number=st.integers(1, 9),
    micro_batch_s=_SECONDS,
    compute_s=_SECONDS,
    waited_s=_SECONDS,
    update_s=_SECONDS,
    iteration_s=_SECONDS,
)


@given(
    st.lists(_TEXTS | _ERRORS.map(str), max_size=3),
    st.lists(st.tuples(*[_TIMES] * 4), max_size=6),
    st.booleans(),
)
def test_what_is_written_is_read_back(
    tmp_path_factory: pytest.TempPathFactory,
    reasons: list[str],
    iterations: list[tuple[IterationTimes, ...]],
    ended: bool,
) -> None:
    """After a request that was refused with its list of problems, nobody could read the status."""
    status = _status()
    for each in iterations:
        status.take(each)
    for reason in reasons:
        status.moves.append(Move(iteration=3, plan=None, refused=reason))
    status.ended = ended
    written = status.now(written_s=5.0)
    path = tmp_path_factory.mktemp("status")
    write_text(path / STATUS_NAME, dump_status(written))
    assert load_status(path) == written
    for move, reason in zip(written.moves, reasons, strict=True):
        assert move.refused is not None
        # Word by word, as far as it can be printed.
        assert all(word in move.refused for word in reason.split() if word.isprintable())
