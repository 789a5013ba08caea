"""Stock Megatron trains on a CPU: every precision, layouts, saving and resuming.

`test_tutorial` trains under a real torchrun.
"""

import functools
import math
from pathlib import Path

import pytest

from tests.megatron.launch import MegatronServer, default_server
from tests.megatron.small_run import small_run_flags, stock
from tests.megatron.stock_log import iterations
from zorse_megatron.errors import RankFailure
from zorse_megatron.flags.table import WITHOUT_EVALUATION

SAVED, STEPS = 2, 4
DROPOUT = ("--hidden-dropout", "0.1")
FP16 = ("--fp16", "--initial-loss-scale", "65536")
# A vocabulary of 256 bytes that is guessed evenly costs ln 256 = 5.545.
UNTRAINED_LOSS = math.log(256)


def losses(output: str) -> list[float]:
    return [line.lm_loss for line in iterations(output) if line.lm_loss is not None]


@functools.cache
def losses_of(
    corpus_prefix: Path, flags: tuple[str, ...], world_size: int, train_iters: int = STEPS
) -> list[float]:
    """Those of a run, made once."""
    command = [
        *small_run_flags(corpus_prefix, train_iters=train_iters),
        *flags,
        *WITHOUT_EVALUATION,
    ]
    run = stock(default_server(), command, world_size)
    return losses(run.outputs[-1])


@pytest.mark.parametrize(
    ("world_size", "flags"),
    [
        pytest.param(1, (), id="fp32"),
        pytest.param(1, ("--bf16",), id="bf16"),
        pytest.param(1, FP16, id="fp16"),
        pytest.param(2, ("--tensor-model-parallel-size", "2"), id="tp2"),
        pytest.param(
            2, ("--bf16", "--use-distributed-optimizer", "--overlap-grad-reduce"), id="dp2-overlap"
        ),
    ],
)
def test_stock_trains(corpus_prefix: Path, world_size: int, flags: tuple[str, ...]) -> None:
    assert_trains(losses_of(corpus_prefix, flags, world_size))


def assert_trains(found: list[float]) -> None:
    assert len(found) == STEPS
    assert all(math.isfinite(loss) for loss in found)
    assert found[0] == pytest.approx(UNTRAINED_LOSS, abs=0.2)
    assert found[-1] < found[0] - 0.5


def test_precisions_agree(corpus_prefix: Path) -> None:
    """Half precision computes the first loss of the same weights to its own accuracy."""
    fp32, bf16, fp16 = (
        losses_of(corpus_prefix, precision, 1)[0] for precision in ((), ("--bf16",), FP16)
    )
    # 2**-8 and 2**-11 are the rounding steps; the mean over 512 tokens is well inside one of them.
    assert bf16 == pytest.approx(fp32, rel=2**-8)
    assert fp16 == pytest.approx(fp32, rel=2**-11)


def test_fp16_scales_the_loss(megatron_server: MegatronServer, corpus_prefix: Path) -> None:
    """Gradients that overflow are found, the step is skipped and the scale halves."""
    flags = [*small_run_flags(corpus_prefix, train_iters=3), "--fp16", "--hysteresis", "1"]
    log = iterations(stock(megatron_server, flags).outputs[0])
    assert [line.loss_scale for line in log] == [2.0**31, 2.0**30, 2.0**29]
    assert log[0].lm_loss is None  # stock prints no loss for a skipped step


def test_recomputation_repeats_dropout(corpus_prefix: Path) -> None:
    """Saving and restoring the random state around a layer works with one generator.

    So two runs are equal to the bit.
    """
    recompute = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    recomputed = losses_of(corpus_prefix, (*DROPOUT, *recompute.split()), 1, 2)
    assert losses_of(corpus_prefix, DROPOUT, 1, 2) == recomputed


def test_saves_and_resumes(
    megatron_server: MegatronServer, corpus_prefix: Path, tmp_path: Path
) -> None:
    """A pipeline goes on from iteration 2 as the run did that saved there, which trains."""
    save = ("--save", str(tmp_path), "--save-interval", str(SAVED))
    load = ("--load", str(tmp_path), "--ckpt-step", str(SAVED))
    flags = [
        *small_run_flags(corpus_prefix, train_iters=STEPS),
        *("--pipeline-model-parallel-size", "2"),
    ]
    output = stock(megatron_server, [*flags, *save], 2).outputs[-1]
    assert_trains(losses(output))
    whole = iterations(output)
    resumed = iterations(stock(megatron_server, [*flags, *load], 2).outputs[-1])
    assert [line.iteration for line in resumed] == [3, 4]
    # Gradient norms: the first loss that stock prints after a resume averages two iterations.
    assert [line.grad_norm for line in resumed] == [line.grad_norm for line in whole[SAVED:]]


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
    with pytest.raises(RankFailure, match=r"not ended after 2(?s:.*)gpt_entry.py"):
        stock(megatron_server, flags, timeout_s=2)
    stock(megatron_server, small_run_flags(corpus_prefix, train_iters=1))  # the server lives on
