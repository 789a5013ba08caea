"""Stock Megatron trains on a CPU: every precision, layouts, saving and resuming."""

import math
import subprocess
import sys
from pathlib import Path

import pytest

from tests.megatron.launch import REPOSITORY, MegatronServer, server_environment
from tests.megatron.small_run import small_run_flags, stock
from tests.megatron.stock_log import iterations
from zorse_megatron.errors import RankFailure

FP16 = ("--fp16", "--initial-loss-scale", "65536")
# A vocabulary of 256 bytes that is guessed evenly costs ln 256 = 5.545.
UNTRAINED_LOSS = math.log(256)


def losses(output: str) -> list[float]:
    return [line.lm_loss for line in iterations(output) if line.lm_loss is not None]


@pytest.mark.parametrize(
    ("world_size", "flags"),
    [
        pytest.param(1, (), id="fp32"),
        pytest.param(1, ("--bf16",), id="bf16"),
        pytest.param(1, FP16, id="fp16"),
        pytest.param(1, ("--bf16", "--use-distributed-optimizer"), id="bf16-distributed-optimizer"),
        pytest.param(4, ("--pipeline-model-parallel-size", "2"), id="pp2-dp2"),
        pytest.param(2, ("--tensor-model-parallel-size", "2"), id="tp2"),
        pytest.param(2, ("--use-distributed-optimizer", "--overlap-grad-reduce"), id="dp2-overlap"),
    ],
)
def test_stock_trains(
    megatron_server: MegatronServer, corpus_prefix: Path, world_size: int, flags: tuple[str, ...]
) -> None:
    result = stock(megatron_server, [*small_run_flags(corpus_prefix), *flags], world_size)
    found = losses(result.outputs[-1])
    assert len(found) == 6
    assert all(math.isfinite(loss) for loss in found)
    assert found[0] == pytest.approx(UNTRAINED_LOSS, abs=0.2)
    assert found[-1] < found[0] - 0.5


def test_stock_trains_under_torchrun(corpus_prefix: Path) -> None:
    """The same without our test harness: processes that import everything themselves."""
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone")
    launcher = subprocess.Popen(
        [
            *(*torchrun, "--nproc-per-node", "2", "-m", "tests.megatron.stock_entry"),
            *small_run_flags(corpus_prefix),
        ],
        cwd=REPOSITORY,
        env=server_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = launcher.communicate(timeout=180)
    finally:
        launcher.terminate()  # torchrun ends its ranks when it is asked to stop, not when killed
        launcher.wait()
    assert launcher.returncode == 0, output[-4000:]
    assert len(losses(output)) == 6
    assert output.count("zorse: no GPU found: Megatron runs on CPU over gloo") == 1


def test_precisions_agree(megatron_server: MegatronServer, corpus_prefix: Path) -> None:
    """Half precision computes the first loss of the same weights to its own accuracy."""
    flags = small_run_flags(corpus_prefix, train_iters=1)
    fp32, bf16, fp16 = (
        losses(stock(megatron_server, [*flags, *precision]).outputs[0])[0]
        for precision in ((), ("--bf16",), FP16)
    )
    # 2**-8 and 2**-11 are the rounding steps; the mean over 512 tokens is well inside one of them.
    assert bf16 == pytest.approx(fp32, rel=2**-8)
    assert fp16 == pytest.approx(fp32, rel=2**-11)


def test_fp16_scales_the_loss(megatron_server: MegatronServer, corpus_prefix: Path) -> None:
    """Gradients that overflow are found, the step is skipped and the scale halves."""
    flags = [*small_run_flags(corpus_prefix), "--fp16", "--hysteresis", "1"]
    log = iterations(stock(megatron_server, flags).outputs[0])
    assert [line.loss_scale for line in log[:3]] == [2.0**31, 2.0**30, 2.0**29]
    assert log[0].lm_loss is None  # stock prints no loss for a skipped step


def test_reruns_are_equal_to_the_bit(megatron_server: MegatronServer, corpus_prefix: Path) -> None:
    flags = [*small_run_flags(corpus_prefix), "--hidden-dropout", "0.1"]
    first, second = (losses(stock(megatron_server, flags).outputs[0]) for _ in range(2))
    assert first == second


def test_recomputation_repeats_dropout(
    megatron_server: MegatronServer, corpus_prefix: Path
) -> None:
    """Saving and restoring the random state around a layer works with one generator."""
    flags = [*small_run_flags(corpus_prefix), "--hidden-dropout", "0.1"]
    recompute = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    kept = losses(stock(megatron_server, flags).outputs[0])
    recomputed = losses(stock(megatron_server, [*flags, *recompute.split()]).outputs[0])
    assert kept == recomputed


def test_saves_and_resumes(
    megatron_server: MegatronServer, corpus_prefix: Path, tmp_path: Path
) -> None:
    """A run that stops at iteration 4 and goes on ends where an uninterrupted one does."""
    pipeline = ("--pipeline-model-parallel-size", "2")
    checkpoint = ("--save", str(tmp_path), "--save-interval", "4", "--load", str(tmp_path))
    flags = [*small_run_flags(corpus_prefix), *pipeline]
    whole = iterations(stock(megatron_server, flags, 2).outputs[-1])
    stock(megatron_server, [*flags, *checkpoint, "--exit-interval", "4"], 2)
    resumed = iterations(stock(megatron_server, [*flags, *checkpoint], 2).outputs[-1])
    assert [line.iteration for line in resumed] == [5, 6]
    # Gradient norms: the first loss that stock prints after a resume averages two iterations.
    assert [line.grad_norm for line in resumed] == [line.grad_norm for line in whole[4:]]


def test_a_rank_that_fails_ends_the_job(
    megatron_server: MegatronServer, corpus_prefix: Path
) -> None:
    flags = [*small_run_flags(corpus_prefix), "--sequence-parallel"]
    with pytest.raises(RankFailure, match="torch's LayerNorm"):
        stock(megatron_server, flags)


def test_a_job_that_takes_too_long_shows_where_it_is(
    megatron_server: MegatronServer, corpus_prefix: Path
) -> None:
    flags = small_run_flags(corpus_prefix, train_iters=100_000)
    with pytest.raises(RankFailure, match=r"not ended after 3(?s:.*)gpt_entry.py"):
        stock(megatron_server, flags, timeout_s=3)
    stock(megatron_server, small_run_flags(corpus_prefix, train_iters=1))  # the server lives on
