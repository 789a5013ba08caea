"""The training command of a single rank that builds one layer of the user's model."""

from collections.abc import Sequence
from pathlib import Path

from zorse_megatron.schema.model.model_shape import ModelShape

# What a plan decides, or what has to do with other ranks, with checkpoints or with logs: a single
# layer on a single rank needs none of it. Flag -> number of values that follow it; -1: all.
_LEFT_OUT = {
    "--num-layers-per-virtual-pipeline-stage": 1,
    "--num-virtual-stages-per-pipeline-rank": 1,
    "--pipeline-model-parallel-layout": 1,
    "--decoder-first-pipeline-num-layers": 1,
    "--decoder-last-pipeline-num-layers": 1,
    "--account-for-embedding-in-pipeline-split": 0,
    "--account-for-loss-in-pipeline-split": 0,
    "--sequence-parallel": 0,
    "--overlap-grad-reduce": 0,
    "--overlap-param-gather": 0,
    "--recompute-activations": 0,
    "--recompute-granularity": 1,
    "--recompute-method": 1,
    "--recompute-num-layers": 1,
    "--recompute-modules": -1,
    "--rampup-batch-size": 3,
    "--load": 1,
    "--use-checkpoint-args": 0,
    "--use-mp-args-from-checkpoint-args": 0,
    "--pretrained-checkpoint": 1,
    "--save": 1,
    "--tensorboard-dir": 1,
    "--wandb-project": 1,
    "--train-samples": 1,
    "--lr-decay-samples": 1,
    "--lr-warmup-samples": 1,
    "--lr-decay-iters": 1,
    "--lr-warmup-iters": 1,
    "--lr-warmup-fraction": 1,
    "--tokenizer-type": 1,
    "--tokenizer-model": 1,
    "--vocab-file": 1,
    "--merge-file": 1,
    "--null-tokenizer-eod-id": 1,
}


def split_script(command: Sequence[str]) -> tuple[Path | None, tuple[str, ...]]:
    """Return the script in front of the flags, if there is one, and the flags.

    >>> split_script(["pretrain_gpt.py", "--bf16"])
    (PosixPath('pretrain_gpt.py'), ('--bf16',))
    """
    if command and command[0].endswith(".py"):
        return Path(command[0]), tuple(command[1:])
    return None, tuple(command)


def single_layer_flags(flags: Sequence[str], shape: ModelShape) -> tuple[str, ...]:
    """Return the flags that build embedding, one layer and head of a model on one rank.

    Of flags that are given twice stock takes the last one, so ours come behind. The tokenizer is
    one without files: only the size of its vocabulary matters.
    """
    return (
        *_without_left_out(flags),
        *("--num-layers", "1", "--micro-batch-size", "1", "--global-batch-size", "1"),
        *("--pipeline-model-parallel-size", "1", "--tensor-model-parallel-size", "1"),
        *("--train-iters", "1", "--lr", "1e-4", "--lr-decay-style", "constant"),
        *("--tokenizer-type", "NullTokenizer", "--null-tokenizer-eod-id", "0"),
        *("--vocab-size", str(shape.vocab_size), "--make-vocab-size-divisible-by", "1"),
    )


def _without_left_out(flags: Sequence[str]) -> list[str]:
    kept: list[str] = []
    skip = 0
    for word in flags:
        is_flag = word.startswith("--")
        if is_flag:
            flag, equals, _ = word.partition("=")
            is_ours = flag.startswith("--zorse-")  # each with one value
            skip = 0 if equals else _LEFT_OUT.get(flag, int(is_ours))
            if flag not in _LEFT_OUT and not is_ours:
                kept.append(word)
        elif skip:
            skip -= 1
        else:
            kept.append(word)
    return kept
