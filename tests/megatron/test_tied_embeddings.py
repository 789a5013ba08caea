"""A tied embedding on two groups of different size, against one stock process."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.megatron import tiny_gpt
from tests.megatron.preloaded import run_megatron_ranks
from tests.megatron.tiny_gpt import Setup
from tests.ranks.harness import RanksFailed

FIRST, LAST = [0, 1], [2, 3, 4]
FIRST_WEIGHTS, LAST_WEIGHTS = (3, 1), (0, 1, 2)
WHOLE = Setup(clip_grad=0.5)


def _build(**overrides: Any) -> tuple[Setup, Any, Any, Any]:
    """This rank's stage, chunk, optimizer and tied embedding."""
    from zorse_megatron.adapter.tied_embeddings import TiedEmbedding

    is_first = dist.get_rank() in FIRST
    setup = replace(WHOLE, stage=0 if is_first else 1, num_stages=2, layers_per_stage=1)
    collection = tiny_gpt.groups_of([FIRST, LAST], setup)
    chunk = tiny_gpt.wrap(
        tiny_gpt.build_gpt(setup, collection),
        setup,
        collection,
        FIRST_WEIGHTS if is_first else LAST_WEIGHTS,
    )
    optimizer = tiny_gpt.build_ours(setup, chunk, collection, **overrides)
    assert dist.group.WORLD is not None
    tied = TiedEmbedding(
        model_chunks=[chunk], first_ranks=FIRST, last_ranks=LAST, group=dist.group.WORLD
    )
    return setup, chunk, optimizer, tied


def _train() -> list[float]:
    """Steps with clipping; the norm counts the embedding once."""
    tiny_gpt.start()
    setup, chunk, optimizer, tied = _build()
    stock, stock_optimizer = tiny_gpt.make_stock(WHOLE)
    tied.check_update_rule(optimizer)
    members = FIRST if dist.get_rank() in FIRST else LAST
    for step in range(3):
        mine = range(members.index(dist.get_rank()), 6, len(members))
        tiny_gpt.set_gradients(chunk, setup, step=step, contributors=mine)
        tiny_gpt.set_gradients(stock, WHOLE, step=step, contributors=range(6))
        _, norm, zeros = tiny_gpt.reduce_and_step(chunk, optimizer, tied=tied)
        _, stock_norm, stock_zeros = tiny_gpt.reduce_and_step(stock, stock_optimizer)
        assert norm == pytest.approx(stock_norm, rel=1e-6)
        assert zeros == stock_zeros
    whole = tiny_gpt.weights_of(stock, WHOLE)
    for name, weight in tiny_gpt.weights_of(chunk, setup).items():
        source = "embedding.word_embeddings.weight" if name == "output_layer.weight" else name
        assert torch.allclose(weight, whole[source], rtol=0, atol=2.4e-7), name
    return chunk.module.shared_embedding_or_output_weight().detach().view(-1).tolist()


def test_both_copies_stay_equal_and_train_like_one() -> None:
    copies = run_megatron_ranks(5, _train)
    assert all(copy == copies[0] for copy in copies)


def _train_with_unequal_rules() -> None:
    tiny_gpt.start()
    from megatron.core.optimizer import ParamKey

    _, _, optimizer, tied = _build(
        config_overrides={ParamKey(name="*output_layer.weight"): {"wd_mult": 0.0}}
    )
    tied.check_update_rule(optimizer)


def test_copies_with_different_rules_are_refused() -> None:
    with pytest.raises(RanksFailed, match="different parameter groups"):
        run_megatron_ranks(5, _train_with_unequal_rules)
