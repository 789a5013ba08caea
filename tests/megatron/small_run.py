"""The flags of the small training run that the end-to-end tests share."""

from pathlib import Path

from tests.megatron.launch import ONE_QUEUE, MegatronServer, RunResult
from zorse_megatron.flags.table import WITHOUT_DROPOUT, WITHOUT_WORKERS

# The flags of `zorse_megatron.adapter.corpus.tokenizer_flags`, spelled out: the test
# process must not import Megatron, and `test_corpus.py` checks that they are the same.
TOKENIZER_FLAGS = (
    *("--tokenizer-type", "NullTokenizer"),
    *("--vocab-size", "256"),
    *("--null-tokenizer-eod-id", "0"),
    *("--make-vocab-size-divisible-by", "32"),
)


def small_run_flags(corpus_prefix: Path, *, train_iters: int = 6) -> list[str]:
    """Return the flags of a GPT with 4 layers of width 64 that trains on `corpus_prefix`."""
    return [
        *("--num-layers", "4", "--hidden-size", "64", "--num-attention-heads", "4"),
        *("--seq-length", "64", "--max-position-embeddings", "64"),
        *("--micro-batch-size", "2", "--global-batch-size", "8"),
        *("--train-iters", str(train_iters), "--lr", "1e-2"),
        *("--lr-decay-style", "constant", *WITHOUT_DROPOUT),
        *("--data-path", str(corpus_prefix), "--split", "90,10,0", *TOKENIZER_FLAGS),
        *("--eval-iters", "2", "--eval-interval", "1000"),
        *("--log-interval", "1", *WITHOUT_WORKERS),
    ]


def stock(
    server: MegatronServer, flags: list[str], world_size: int = 1, *, timeout_s: float = 120
) -> RunResult:
    """Train stock Megatron; raises RankFailure unless every rank ends with status 0."""
    return server.run_ranks(
        flags,
        world_size,
        entry="tests.megatron.stock_entry",
        timeout_s=timeout_s,
        env=ONE_QUEUE,
    ).check()
