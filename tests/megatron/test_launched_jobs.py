"""What `zorse launch` writes runs to its end with Megatron's defaults: evaluations, data loader
workers, and the handler of signals that comes with --save. `test_tutorial` does it by the real
torchrun, `tests/slurm` under Slurm.
"""

import shlex
from pathlib import Path

import pytest

from tests.megatron.launch import MegatronServer
from tests.printed import run_zorse, searching_little
from zorse_megatron.launch.rank_environment import OUTCOME
from zorse_megatron.live.checkpoint_files import read_tracker
from zorse_megatron.live.watched_rank import ASKED_TO_END
from zorse_megatron.processes import free_port

CLUSTER = "nodes:\n  - gpus: [1 x A6000, 1 x A100-40]\n"
FLAGS = (
    *("--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4"),
    *("--seq-length", "32", "--max-position-embeddings", "32", "--global-batch-size", "4"),
    *("--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "255"),
    # Megatron has no default for the first of these.
    *("--eval-interval", "1000", "--log-interval", "1", "--lr", "1e-3", "--bf16"),
)


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With a cluster file and a plan; commands run there."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    plan = ["zorse", "plan", "--use-all", "--cluster", "cluster.yaml", "--out", "plan.json", "--"]
    with searching_little():
        run_zorse([*plan, *FLAGS, "--train-iters", "3"])
    return tmp_path


def launched(*more: str) -> str:
    """The command that `zorse launch` writes."""
    launch = ["zorse", "launch", "plan.json", "--cluster", "cluster.yaml", "--torchrun"]
    port = ("--master-port", str(free_port()))
    return run_zorse([*launch, *port, "--", *FLAGS, *more, "--save", "saved"])


def words_for_ranks(command: str) -> list[str]:
    """What follows the module."""
    (line,) = [line for line in command.splitlines() if not line.startswith("#")]
    words = shlex.split(line)
    assert words[words.index("--nproc-per-node") + 1] == "2"
    assert "--exit-signal-handler" in words and "--num-workers" not in words
    return words[words.index("-m") + 2 :]


def test_every_way_to_end(directory: Path, megatron_server: MegatronServer) -> None:
    """Stopped in an evaluation, at an interval, at the last iteration, with nothing left to do.

    Where the last iteration is reached, evaluations have Megatron's hundred iterations.
    """
    saved, few = directory / "saved", ("--eval-iters", "2")
    for more, entry, reached, said in (
        (
            ("--eval-interval", "2", *few),
            "tests.megatron.stopped_entry",
            "2",
            "zorse: ended by SIGTERM. The checkpoint of iteration 2 is complete.",
        ),
        (
            ("--exit-interval", "4", *few),
            "zorse_megatron.pretrain",
            "4",
            "exiting program at iteration 4",
        ),
        ((), "zorse_megatron.pretrain", "6", "iteration 6 on test set"),
        (few, "zorse_megatron.pretrain", "6", "iteration 6 on test set"),
    ):
        words = words_for_ranks(launched("--train-iters", "6", "--save-interval", "6", *more))
        ended = megatron_server.run_ranks(
            words, 2, entry=entry, directory=directory, timeout_s=120
        ).check()
        assert read_tracker(saved).text == reached
        assert any(said in output for output in ended.outputs), ended.outputs


def test_a_stopped_elastic_job_is_not_done(
    directory: Path, megatron_server: MegatronServer
) -> None:
    """A torchrun ends its own ranks for a node that comes; that of the others must start again."""
    flags = ("--train-iters", "6", "--save-interval", "6", "--eval-interval", "2")
    ended = megatron_server.run_ranks(
        words_for_ranks(launched(*flags, "--eval-iters", "2")),
        2,
        entry="tests.megatron.stopped_entry",
        directory=directory,
        env={"ZORSE_TEST_STOPPED": "0", "TORCHELASTIC_RUN_ID": "run", OUTCOME: "outcome"},
        timeout_s=120,
    )
    assert ended.returncodes == (ASKED_TO_END, ASKED_TO_END), ended.outputs
    assert read_tracker(directory / "saved").text == "2"
    assert "zorse: ended by SIGTERM. The checkpoint of iteration 2" in ended.outputs[0]
    assert not any("zorse: error" in output for output in ended.outputs)
    assert not (directory / "outcome").exists()


def test_a_rank_that_fails_ends_by_itself(directory: Path, megatron_server: MegatronServer) -> None:
    """Not by its watcher, which ends it if it does not: a job of one rank has none."""
    words = words_for_ranks(launched("--train-iters", "6", "--save-interval", "6"))
    failed = megatron_server.run_ranks(
        words,
        2,
        entry="tests.megatron.dying_entry",
        directory=directory,
        env={"ZORSE_TEST_DEATH": "raise:1:2"},
        timeout_s=60,
        grace_after_failure_s=30,
    )
    assert failed.returncodes[1] == 1, failed.outputs[1]


def test_prints_no_more_than_stock(directory: Path, megatron_server: MegatronServer) -> None:
    """Of a plan with more chunks than stock has stages."""
    flags = [*FLAGS, "--train-iters", "3", "--eval-iters", "2"]
    plan = ["--zorse-plan", str(directory / "plan.json")]
    ours = megatron_server.run_ranks([*flags, *plan], 2, timeout_s=120).check()
    stock = megatron_server.run_ranks(
        [*flags, "--use-distributed-optimizer", "--micro-batch-size", "1"],
        2,
        entry="tests.megatron.stock_entry",
        timeout_s=120,
    ).check()
    num_lines = [sum(len(each.splitlines()) for each in run.outputs) for run in (ours, stock)]
    assert num_lines[0] < num_lines[1] / 3
    assert "train_iters" in ours.outputs[0] and "swiglu" not in ours.outputs[0]
    whole = megatron_server.run_ranks([*flags, *plan, "--logging-level", "10"], 2, timeout_s=120)
    assert "swiglu" in whole.check().outputs[0]
