"""`zorse_megatron.pretrain`, with what it computes written down for a comparison.

Writes to `$ZORSE_TEST_RECORD`: `steps-rank<R>.json` (exact loss and gradient norm of every step
that this rank logs), `initial-rank<R>.pt` and `weights-rank<R>.pt` (its parameters before the first
and after the last step, by their names in the whole model). The recorder reads what stock's own
loop passes to `training_log`, so it is the same for stock and for a plan. With
`$ZORSE_TEST_INITIAL` ranks of stock, in fp32, start from the `initial-rank<R>.pt` there.
"""

import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import wraps
from pathlib import Path
from typing import Any

from tests.megatron.small_pieces import use_small_pieces
from zorse_megatron.adapter import cpu_mode
from zorse_megatron.adapter.plan_run import RankSetup
from zorse_megatron.pretrain import main

RECORD = Path(os.environ.get("ZORSE_TEST_RECORD", "/nowhere"))
OF_EXPERTS = (".expert_bias", ".local_tokens_per_expert")
_LAYER = re.compile(r"(decoder\.layers\.)(\d+)\.")


def recording_log(training_log: Callable[..., Any], steps: list[dict[str, Any]]) -> Any:
    @wraps(training_log)  # whose parameters are compared with those that are known
    def log(loss_dict: Any, total: Any, lr: Any, iteration: int, *args: Any, **kwargs: Any) -> Any:
        loss_scale, _, skipped, grad_norm, params_norm, num_zeros = args[:6]
        steps.append(
            {
                "iteration": iteration,
                "loss": {name: value.item() for name, value in loss_dict.items()},
                "grad_norm": None if grad_norm is None else float(grad_norm),
                "params_norm": None if params_norm is None else float(params_norm),
                "skipped": skipped,
                "num_zeros": num_zeros,
                "loss_scale": float(loss_scale),
                "lr": lr,
            }
        )
        return training_log(loss_dict, total, lr, iteration, *args, **kwargs)

    return log


def recording_train(train: Callable[..., Any], steps: list[dict[str, Any]]) -> Any:
    def train_and_record(
        forward_step: Any, model: Any, optimizer: Any, *args: Any, **kw: Any
    ) -> Any:
        import torch

        rank = os.environ.get("RANK", "0")
        if given := os.environ.get("ZORSE_TEST_INITIAL"):
            start_from(model, torch.load(Path(given, f"initial-rank{rank}.pt")))
        torch.save(weights(model), RECORD / f"initial-rank{rank}.pt")
        result = train(forward_step, model, optimizer, *args, **kw)
        torch.save(weights(model), RECORD / f"weights-rank{rank}.pt")
        (RECORD / f"steps-rank{rank}.json").write_text(json.dumps(steps))
        return result

    return train_and_record


def start_from(chunks: Any, given: dict[str, Any]) -> None:
    """Set all parameters."""
    import torch

    with torch.no_grad():
        for chunk in chunks:
            for name, parameter in named_parameters(chunk):
                parameter.copy_(given.pop(name))
    assert not given, f"no parameters for {list(given)}"


def weights(chunks: Any) -> dict[str, Any]:
    """Parameters by their names in the whole model; a collective call where ranks have shards."""
    found: dict[str, Any] = {}
    for chunk in chunks:
        shards = getattr(chunk, "shards", None)
        with nullcontext() if shards is None else unsharded(shards):
            found |= weights_of_chunk(chunk)
    return found


@contextmanager
def unsharded(shards: Any) -> Iterator[None]:
    """Have a chunk's parameters unsharded within the block, and then as they were."""
    was_unsharded, away = shards.is_unsharded, shards._away()
    shards.unshard()
    shards.wait_until_unsharded()
    for buffer in () if was_unsharded else shards.parameters:
        buffer.keep_shard()  # in fp32 it is what the optimizer steps and saves
    yield
    if not was_unsharded:
        shards.reshard()
    for buffer in away:
        buffer.offload()


def weights_of_chunk(chunk: Any) -> dict[str, Any]:
    """Parameters, and buffers that are trained."""
    biases = named_parameters(chunk, of=lambda model: model.named_buffers())
    found = [*named_parameters(chunk), *(each for each in biases if each[0].endswith(OF_EXPERTS))]
    return {name: value.detach().clone() for name, value in found}


def named_parameters(
    chunk: Any, *, of: Callable[[Any], Any] = lambda model: model.named_parameters()
) -> Iterator[tuple[str, Any]]:
    """A chunk's parameters by their names in the whole model."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    numbers = [layer.layer_number - 1 for layer in chunk.decoder.layers]
    for name, parameter in of(chunk):
        yield _LAYER.sub(lambda m: f"{m[1]}{numbers[int(m[2])]}.", name), parameter


CLOSE = 3e-6
"""Of two scores of experts: rounding is a tenth of it."""


def counting_close(
    route: Callable[..., Any], counts: list[Any], choices: list[Any], gaps: list[Any]
) -> Any:
    """Count tokens that would go to other experts if their logits were a little different.

    In tensors, for which the host need not wait. `choices`: [tokens, experts] of each call; `gaps`:
    the least that scores of the last that was chosen and the next one, of groups too, are apart.
    """
    import torch

    topk = torch.topk

    def noting_gaps(scores: Any, k: int, *args: Any, **kwargs: Any) -> Any:
        if k < scores.shape[-1]:
            last, following = topk(scores.detach(), k + 1).values[..., -2:].unbind(-1)
            gaps.append((last - following).min())
        return topk(scores, k, *args, **kwargs)

    def routed(logits: Any, *args: Any, **kwargs: Any) -> Any:
        torch.topk = noting_gaps
        probs, chosen = route(logits, *args, **kwargs)
        torch.topk = topk
        choices.append(chosen)
        generator = torch.Generator().manual_seed(1)
        for _ in range(3):
            noise = torch.empty(logits.shape).uniform_(-CLOSE, CLOSE, generator=generator)
            with torch.no_grad():
                _, others = route(logits.detach() + noise, *args, **kwargs)
            counts.append((others != chosen).any(dim=1).sum())
        return probs, chosen

    return routed


_LAYERS = "transformer_impl"


def let_values_be_narrower() -> None:
    """Of latent attention, for which Megatron has Transformer Engine's core attention alone.

    Its own computes the same once it is told the widths of heads, under a plan and without one.
    """
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    from zorse_megatron.flags import check

    stock, listed = DotProductAttention.__init__, check.further_rows()
    beside = {"multi_latent_attention": True}
    rows = tuple(each for each in listed if (each.flags, each.beside) != (_LAYERS, beside))
    assert len(rows) == len(listed) - 1, "what is refused otherwise"
    check.further_rows = lambda: rows

    def init(
        self: Any, *args: Any, k_channels: int = 0, v_channels: int = 0, **kwargs: Any
    ) -> None:
        stock(self, *args, **kwargs)
        self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition

    DotProductAttention.__init__ = init


def record(setup: RankSetup | None = None) -> None:
    use_small_pieces()
    if cpu_mode.needed():
        cpu_mode.enable()
    if "--multi-latent-attention" in sys.argv:
        let_values_be_narrower()
    from megatron.training import training

    num_close: list[Any] = []
    choices: list[Any] = []
    gaps: list[Any] = []
    # Of stock alone, which is what is compared with.
    if "--num-experts" in sys.argv and "--zorse-plan" not in sys.argv:
        from megatron.core.transformer.moe import router

        name = "topk_routing_with_score_function"
        setattr(router, name, counting_close(getattr(router, name), num_close, choices, gaps))
    steps: list[dict[str, Any]] = []
    RECORD.mkdir(parents=True, exist_ok=True)
    training.training_log = recording_log(training.training_log, steps)
    training.train = recording_train(training.train, steps)
    main(setup=setup)
    (RECORD / f"close-rank{os.environ.get('RANK', '0')}.json").write_text(
        json.dumps([int(each) for each in num_close])
    )
    if choices:
        import torch

        torch.save(choices, RECORD / f"choices-rank{os.environ.get('RANK', '0')}.pt")
        (RECORD / f"gap-rank{os.environ.get('RANK', '0')}.json").write_text(
            json.dumps(min(map(float, gaps), default=None))
        )


if __name__ == "__main__":
    record()
