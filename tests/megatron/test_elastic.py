"""A job that loses a node goes on with the others, as if nothing had happened."""

import json
import os
import socket
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from tests.megatron.comparison import BASE_FLAGS
from tests.megatron.launch import RunResult, run_ranks
from tests.megatron.small_run import TOKENIZER_FLAGS
from tests.megatron.test_checkpoints import MAX_DIFFERENCE
from tests.megatron.test_rank_death import without_timeout
from zorse_megatron.cli.main import app
from zorse_megatron.launch.replan import Replanner
from zorse_megatron.launch.training_command import training_of
from zorse_megatron.live.checkpoint_choice import newest_saved
from zorse_megatron.live.one_writer import WRITER_NAME, OneWriter
from zorse_megatron.live.watched_rank import BAD_INPUT
from zorse_megatron.plan.plan_file import load_plan

STEPS, SAVED_EVERY, LOST_IN = 6, 2, 5
CLUSTER = """
nodes:
  - {name: new, gpus: 2 x L4, nics: 10 Gb/s}
  - {name: lost, gpus: 1 x T4, nics: 10 Gb/s}
  - {name: old, gpus: 1 x T4, nics: 10 Gb/s}
"""
LOST_RANK = 2
COMMAND = (
    *without_timeout(BASE_FLAGS),
    *("--train-iters", str(STEPS), "--mock-data", "--split", "90,5,5", *TOKENIZER_FLAGS),
    *("--clip-grad", "0.5"),
)


def curve(path: Path) -> list[tuple[int, float]]:
    steps = [json.loads(line) for line in path.read_text().splitlines()]
    return [(step["iteration"], step["lm loss"]) for step in steps]


def test_training_goes_on_exactly_without_a_lost_node(tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    save, metrics = tmp_path / "checkpoints", tmp_path / "metrics.jsonl"
    training = (
        *COMMAND,
        *("--save", str(save), "--save-interval", str(SAVED_EVERY)),
        *("--zorse-metrics", str(metrics)),
    )
    plan, cluster = tmp_path / "plan.json", tmp_path / "cluster.yaml"
    files = ["--cluster", str(cluster), "--out", str(plan), "--use-all"]
    CliRunner().invoke(app, ["plan", *files, "--", *training])
    replanner = Replanner(
        plan=plan,
        cluster=cluster,
        directory=tmp_path / "plans",
        training=training,
        min_gpus=3,
        save=str(save),
    )

    def attempt(present: set[str], **options: Any) -> RunResult:
        files = replanner.files_for(present)
        words = training_of(training, plan=str(files.plan), cluster=None).words
        world_size = load_plan(files.plan).world_size
        return run_ranks(words, world_size, timeout_s=90, **options)

    died = attempt(
        {"new", "lost", "old"},
        entry="tests.megatron.dying_entry",
        grace_after_failure_s=30,
        env={"ZORSE_TEST_DEATH": f"kill:{LOST_RANK}:{LOST_IN}"},
    )
    assert len(died.returncodes) == 4 and all(died.returncodes)
    assert "rank 2 (" in died.outputs[0] and "SIGKILL" in died.outputs[0]
    assert newest_saved(str(save)) == SAVED_EVERY * ((LOST_IN - 1) // SAVED_EVERY)
    told: list[str] = []
    another_job = OneWriter(save, "", tell=told.append)
    assert "which is gone" in told[0], "rank 0 was ended, and left its file"
    refused = attempt({"new", "old"})
    assert refused.returncodes == (BAD_INPUT,) * 3
    assert f"found process {os.getpid()} on {socket.gethostname()}, since" in refused.outputs[0]
    another_job.release()
    assert attempt({"new", "old"}).check().returncodes == (0, 0, 0)
    assert not (save / WRITER_NAME).exists()

    stock = tmp_path / "stock.jsonl"
    run_ranks([*COMMAND, "--zorse-metrics", str(stock)], 1, timeout_s=90).check()
    found, expected = curve(metrics), curve(stock)
    assert [step for step, _ in found] == list(range(1, STEPS + 1))
    for (step, mine), (_, theirs) in zip(found, expected, strict=True):
        assert abs(mine - theirs) <= MAX_DIFFERENCE, f"loss of step {step}"
    assert newest_saved(str(save)) == STEPS
