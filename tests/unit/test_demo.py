"""The demo's plan, what it reads from the runs, and when it fails."""

import dataclasses
import json

import pytest
import torch
from rich.console import Console

from zorse_megatron.demo.devices import count_gpus
from zorse_megatron.demo.jobs import DemoJob, DemoProgress, _environment, progress_in
from zorse_megatron.demo.loss_comparison import (
    MAX_ABS_LOSS_DIFFERENCE,
    Comparison,
    DemoError,
    Iteration,
    Run,
    read_run,
    rows_to_show,
)
from zorse_megatron.demo.model import demo_plan, training_flags
from zorse_megatron.demo.report import loss_table, write_json
from zorse_megatron.errors import ZorseError
from zorse_megatron.schedules.lower import lower_plan
from zorse_megatron.schema.plan.plan_json import dump_plan, parse_plan

LINE = (
    " [2026-01-01 00:00:00.000000] iteration       12/      40 | consumed samples:          288 | "
    "elapsed time per iteration (ms): 215.9 | learning rate: 1.0E-03 | global batch size:    24 | "
    "lm loss: 3.526924E+00 | loss scale: 1.0 | grad norm: 2.681 | number of skipped iterations: 0"
)
VALIDATION = (
    " validation loss at iteration 20 | lm loss value: 3.500000E+00 | lm loss PPL: 3.3E+01 | "
)


def run_of(losses, *, norm=2.0, validation=3.5):
    return Run(
        iterations=tuple(
            Iteration(
                iteration=number,
                loss=loss,
                grad_norm=norm,
                learning_rate=1e-3,
                consumed_samples=24 * number,
                elapsed_s=None if number == 1 else 0.25,
            )
            for number, loss in enumerate(losses, start=1)
        ),
        validation_losses=(("iteration 20", validation),),
    )


def write_run(directory, records, log=VALIDATION):
    metrics = directory / "stock.metrics.jsonl"
    metrics.write_text("".join(json.dumps(record) + "\n" for record in records))
    (directory / "stock.log").write_text(log)
    return metrics, directory / "stock.log"


def record_of(iteration, loss=5.0):
    return {
        "iteration": iteration,
        "lm loss": loss,
        "grad_norm": 2.0,
        "learning_rate": 1e-3,
        "consumed_samples": 24 * iteration,
        "elapsed_s": None,
    }


def test_the_plan_is_valid_and_uneven_in_everything():
    plan = parse_plan(dump_plan(demo_plan()).encode())
    lower_plan(plan)
    assert [len(plan.groups[chunk.group].ranks) for chunk in plan.chunks] == [2, 1, 2]
    replicas = [replica for group in plan.groups for replica in group.replicas]
    assert len({replica.micro_batch_size for replica in replicas}) > 2
    assert len({replica.num_microbatches for replica in replicas}) > 2
    assert len({chunk.layers[1] - chunk.layers[0] for chunk in plan.chunks}) == 3
    for group in (plan.groups[0], plan.groups[2]):
        assert len({replica.shard_weight for replica in group.replicas}) == 2


def test_flags_have_what_the_comparison_needs(tmp_path):
    words = training_flags(tmp_path / "text", tokenizer=["--tokenizer"], num_iterations=40)
    given = dict(zip(words, [*words[1:], ""], strict=True))
    assert given["--attention-dropout"] == given["--hidden-dropout"] == "0"
    assert given["--train-iters"] == "40"
    assert given["--distributed-timeout-minutes"] == "1"
    assert not {"--bf16", "--fp16"} & given.keys()


def test_progress_is_read_from_stock_lines():
    assert progress_in(LINE) == DemoProgress(iteration=12, num_iterations=40, loss=3.526924)
    assert progress_in("zorse: plan 0123456789abcdef: 5 ranks") is None
    assert progress_in(VALIDATION) is None


def test_a_run_is_read(tmp_path):
    run = read_run(*write_run(tmp_path, map(record_of, (1, 2))), num_iterations=2)
    assert [iteration.loss for iteration in run.iterations] == [5.0, 5.0]
    assert run.validation_losses == (("iteration 20", 3.5),)


@pytest.mark.parametrize(
    "records",
    [
        [],
        [record_of(1)],
        [record_of(1), record_of(1)],
        [record_of(1), record_of(2, loss=None)],
    ],
    ids=["none", "too few", "twice", "not finite"],
)
def test_an_incomplete_run_is_an_error(tmp_path, records):
    with pytest.raises(DemoError, match=r"each of 1 to 2 once, with finite numbers"):
        read_run(*write_run(tmp_path, records), num_iterations=2)


def test_equal_runs_pass():
    run = run_of([5.0, 4.0])
    nearly = run_of([5.0, 4.0 + MAX_ABS_LOSS_DIFFERENCE / 2], norm=2.0001)
    Comparison(stock=run, plan=run).check()
    Comparison(stock=run, plan=nearly).check()


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (run_of([5.0, 4.0001]), "difference in loss: found 1.000e-04"),
        (run_of([5.0, 4.0], norm=2.001), "relative gradient norm: found 5.000e-04"),
        (run_of([5.0, 4.0], validation=3.6), "validation loss: found 1.000e-01"),
        (
            dataclasses.replace(run_of([5.0, 4.0]), validation_losses=()),
            "validation loss: found inf",
        ),
        (run_of([5.0, float("nan")]), "difference in loss: found nan"),
    ],
)
def test_runs_that_differ_fail(other, named):
    with pytest.raises(DemoError, match=named):
        Comparison(stock=run_of([5.0, 4.0]), plan=other).check()


def test_rows_to_show():
    assert rows_to_show(12, every=5) == [0, 4, 9, 11]
    assert rows_to_show(1, every=5) == [0]


def test_json_has_what_programs_read(tmp_path):
    comparison = Comparison(stock=run_of([5.0, 4.0]), plan=run_of([5.0, 4.00001]))
    path = write_json(
        tmp_path / "demo.json", comparison, demo_plan(), durations_s={"stock": 1.0, "plan": 2.0}
    )
    content = json.loads(path.read_text())
    assert content["steps"] == 2
    assert content["max_abs_loss_diff"] == pytest.approx(1e-5)
    assert content["max_rel_grad_norm_diff"] == 0
    assert content["plan"] == json.loads(dump_plan(demo_plan()))
    assert len(content["iterations"]["plan"]) == 2


def test_table_shows_both_losses():
    console = Console(width=120)
    with console.capture() as captured:
        console.print(loss_table(Comparison(stock=run_of([5.25]), plan=run_of([5.25]))))
    assert captured.get().count("5.25000000") == 2


@pytest.mark.parametrize(
    ("on_gpu", "shares", "visible", "shared"),
    [(False, False, "", None), (True, False, "0,1", None), (True, True, "0,1", "1")],
)
def test_gpus_are_hidden_unless_they_are_asked_for(
    *, on_gpu, shares, visible, shared, tmp_path, monkeypatch
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    job = DemoJob(
        name="x",
        num_ranks=5,
        arguments=(),
        directory=tmp_path,
        on_gpu=on_gpu,
        shares_gpus=shares,
    )
    environment = _environment(job)
    assert environment["CUDA_VISIBLE_DEVICES"] == visible
    assert environment.get("ZORSE_SHARE_GPUS") == shared


def test_a_demo_on_gpus_that_are_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ZorseError, match="--device: found cuda, while torch sees no GPU"):
        count_gpus()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert count_gpus() == 3
