"""The training command of a single rank that builds one layer of the user's model."""

from collections.abc import Sequence

from zorse_megatron.flags.scan import Nargs, find_flags, split_ours
from zorse_megatron.schema.model.model_shape import ModelShape

# What a plan decides, or what has to do with other ranks, with checkpoints or with logs: a single
# layer on a single rank needs none of it.
_LEFT_OUT: dict[str, Nargs] = {
    "--num-layers-per-virtual-pipeline-stage": "?",
    "--num-virtual-stages-per-pipeline-rank": "?",
    "--pipeline-model-parallel-layout": "?",
    "--decoder-first-pipeline-num-layers": "?",
    "--decoder-last-pipeline-num-layers": "?",
    "--account-for-embedding-in-pipeline-split": 0,
    "--account-for-loss-in-pipeline-split": 0,
    "--sequence-parallel": 0,
    "--overlap-grad-reduce": 0,
    "--overlap-param-gather": 0,
    "--recompute-activations": 0,
    "--recompute-granularity": "?",
    "--recompute-method": "?",
    "--recompute-num-layers": "?",
    "--recompute-modules": "*",
    "--rampup-batch-size": "*",
    "--load": "?",
    "--use-checkpoint-args": 0,
    "--use-mp-args-from-checkpoint-args": 0,
    "--pretrained-checkpoint": "?",
    "--save": "?",
    "--tensorboard-dir": "?",
    "--wandb-project": "?",
    "--train-samples": "?",
    "--lr-decay-samples": "?",
    "--lr-warmup-samples": "?",
    "--lr-decay-iters": "?",
    "--lr-warmup-iters": "?",
    "--lr-warmup-fraction": "?",
    "--tokenizer-type": "?",
    "--tokenizer-model": "?",
    "--vocab-file": "?",
    "--merge-file": "?",
    "--null-tokenizer-eod-id": "?",
}


def single_layer_flags(flags: Sequence[str], shape: ModelShape) -> tuple[str, ...]:
    """Return the flags that build embedding, one layer and head of a model on one rank.

    Of flags that are given twice stock takes the last one, so ours come after. The tokenizer is
    one without files: only the size of its vocabulary matters.
    """
    _, rest = split_ours(flags)
    _, kept = find_flags(rest, _LEFT_OUT)
    return (
        *kept,
        *("--num-layers", "1", "--micro-batch-size", "1", "--global-batch-size", "1"),
        *("--pipeline-model-parallel-size", "1", "--tensor-model-parallel-size", "1"),
        *("--train-iters", "1", "--lr", "1e-4", "--lr-decay-style", "constant"),
        *("--tokenizer-type", "NullTokenizer", "--null-tokenizer-eod-id", "0"),
        *("--vocab-size", str(shape.vocab_size), "--make-vocab-size-divisible-by", "1"),
    )
