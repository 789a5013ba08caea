"""Figures are drawn from what was recorded, and refuse what they cannot show."""

import dataclasses

import matplotlib.image
import numpy as np
import pytest
from matplotlib.path import Path as MatplotlibPath

from tests.unit.fake_trace import ACTION_S, fake_spans
from zorse_megatron.doctor.plans import UNEVEN_PLAN
from zorse_megatron.plots import gantt
from zorse_megatron.plots.figures import ChunkLine, Level, LossCurve, draw_by_chunks, draw_curves
from zorse_megatron.plots.gantt import draw_gantt
from zorse_megatron.plots.shown import duration_s, fastest_step, spans_of_step, training_steps

PLAN = UNEVEN_PLAN


def curve(losses, first_iteration=1):
    iterations = range(first_iteration, first_iteration + len(losses))
    return LossCurve(label="a run", iterations=iterations, losses=losses)


def colours_of(path):
    """The colours of the figure's pixels, each as (red, green, blue) from 0 to 255."""
    pixels = (matplotlib.image.imread(path)[..., :3] * 255).round().astype(int)
    # As one number each: to sort rows of three takes seconds.
    packed = np.unique(pixels @ (1 << 16, 1 << 8, 1))
    return {(each >> 16, each >> 8 & 255, each & 255) for each in packed.tolist()}


def rgb(text):
    return tuple(int(text[i : i + 2], 16) for i in (1, 3, 5))


@pytest.mark.slow
def test_gantt_shows_each_kind_of_action(tmp_path):
    path = draw_gantt(tmp_path / "a" / "t.png", plan=PLAN, spans=fake_spans(PLAN), title="t")
    colours = colours_of(path)
    for kind in ("#56B4E9", "#E69F00", "#009E73", "#CC79A7", "#8C2D04", "#B3A100"):
        assert rgb(kind) in colours


def test_gantt_draws_the_bars_of_a_row_at_once(tmp_path, monkeypatch):
    """An artist for each bar takes minutes where there are thousands; every bar is drawn still."""
    figures = []
    monkeypatch.setattr(gantt, "save_figure", lambda figure, path: figures.append(figure) or path)
    spans = fake_spans(PLAN)
    draw_gantt(tmp_path / "t.png", plan=PLAN, spans=spans, title="t")
    (axes,) = figures[0].axes
    drawn = [patch.get_path() for patch in axes.patches]
    rectangles = sum(int((path.codes == MatplotlibPath.MOVETO).sum()) for path in drawn)
    of_ranks = [span for of_rank in spans.values() for span in of_rank]
    assert rectangles == len(of_ranks) + sum(span.waited_s > 0 for span in of_ranks)
    looks = 1 + len({look for look in gantt._LOOKS.values()})
    assert len(axes.patches) + len(axes.collections) <= looks * len(spans)


def test_gantt_wants_every_rank(tmp_path):
    spans = fake_spans(PLAN)
    del spans[3]
    with pytest.raises(ValueError, match=r"no spans of ranks \[3\]"):
        draw_gantt(tmp_path / "t.png", plan=PLAN, spans=spans, title="t")


@pytest.mark.slow
def test_equal_figures_are_equal_files(tmp_path):
    for name in ("a.png", "b.png"):
        draw_gantt(tmp_path / name, plan=PLAN, spans=fake_spans(PLAN), title="t")
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


@pytest.mark.slow
def test_curves_are_drawn(tmp_path):
    path = draw_curves(
        tmp_path / "loss.png",
        first=curve([5.0, 4.0, 3.0]),
        second=curve([5.0, 4.000001, 3.0]),
        title="t",
        tolerance=2e-5,
        unit="nats",
    )
    assert rgb("#0072B2") in colours_of(path)


def test_curves_over_other_iterations_are_refused(tmp_path):
    with pytest.raises(ValueError, match="same iterations"):
        draw_curves(
            tmp_path / "loss.png",
            first=curve([5.0, 4.0]),
            second=curve([5.0, 4.0], first_iteration=2),
            title="t",
            tolerance=2e-5,
            unit="nats",
        )


@pytest.fixture
def traces():
    """Three training steps, the second of which is the fastest, and an evaluation."""
    spans = {rank: [] for rank in range(PLAN.world_size)}
    for step, speed in ((0, 3), (1, 2), (2, 1), (3, 4)):
        for rank, new in fake_spans(PLAN, step=step, action_s=speed * ACTION_S).items():
            spans[rank] += new
    is_evaluation = {rank: [span.action == "NORM" for span in new] for rank, new in spans.items()}
    return {
        rank: [
            dataclasses.replace(span, action="SCALE") if span.step == 1 and steps else span
            for span, steps in zip(spans[rank], is_evaluation[rank], strict=True)
        ]
        for rank in spans
    }


def test_evaluations_are_no_training_steps(traces):
    assert training_steps(traces) == [0, 2, 3]


def test_the_fastest_step_is_shown(traces):
    assert fastest_step(traces) == 2
    longest = max(len(spans) for spans in fake_spans(PLAN).values())
    assert duration_s(traces, 2) == pytest.approx(longest * ACTION_S)
    assert {span.step for spans in spans_of_step(traces, 2).values() for span in spans} == {2}


def test_no_training_step_is_an_error():
    with pytest.raises(ValueError, match="found no training step"):
        fastest_step({0: []})


def line(**changes):
    options = {"label": "a", "chunks": [1, 2], "predicted": [1.0, 0.6], "iteration_s": [2.0, 1.0]}
    return ChunkLine(**{**options, **changes})


@pytest.mark.slow
def test_memory_by_chunks_is_drawn(tmp_path):
    path = draw_by_chunks(
        tmp_path / "chunks.png",
        [line(), line(measured_chunks=[2], measured=[0.61])],
        [Level(label="a formula", share=0.5)],
        title="t",
        time_title="u",
    )
    assert {rgb("#0072B2"), rgb("#E69F00")} <= colours_of(path)


@pytest.mark.parametrize("changes", [{"iteration_s": [2.0]}, {"measured": [0.5]}])
def test_memory_by_chunks_wants_whole_lines(tmp_path, changes):
    with pytest.raises(ValueError, match="one for each"):
        draw_by_chunks(tmp_path / "c.png", [line(**changes)], [], title="t", time_title="u")
