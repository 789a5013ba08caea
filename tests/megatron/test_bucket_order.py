"""Buckets are communicated in one order even where a model uses its layers in another."""

from typing import Any

import torch
import torch.distributed as dist

from tests.megatron import tiny_gpt
from tests.megatron.preloaded import run_megatron_ranks
from tests.megatron.tiny_gpt import Setup


def _build(setup: Setup, collection: Any, weights: tuple[float, ...]) -> Any:
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.module import MegatronModule

    class UsesItsLayersBackwards(MegatronModule):
        """Registers first the layer that it applies last, so gradients come in the other order."""

        def __init__(self) -> None:
            config = TransformerConfig(
                num_layers=1, hidden_size=16, num_attention_heads=1, calculate_per_token_loss=True
            )
            super().__init__(config)
            torch.manual_seed(0)
            self.last = torch.nn.Linear(300, 5)  # of different sizes, so that mixing them up shows
            self.first = torch.nn.Linear(40, 300)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.first(x))

    return tiny_gpt.wrap(UsesItsLayersBackwards(), setup, collection, weights)


def _train(setup: Setup, weights: tuple[float, ...]) -> list[float]:
    """Rank 0 trains every step, the others never run a forward; returns the last weights."""
    tiny_gpt.start()
    collection = tiny_gpt.groups_of([list(range(len(weights)))], setup)
    chunk = _build(setup, collection, weights)
    optimizer = tiny_gpt.build_ours(setup, chunk, collection)
    starts: list[int] = []
    for number, group in enumerate(chunk.bucket_groups):
        group.dispatch_grad_sync = _noted(group.dispatch_grad_sync, number, starts)
    for step in range(4):
        if dist.get_rank() == 0:
            x = torch.randn(3, 40, generator=torch.Generator().manual_seed(step))
            chunk(x).square().sum().backward()
        tiny_gpt.reduce_and_step(chunk, optimizer)
    assert starts == list(range(len(chunk.bucket_groups))) * 4
    if setup.overlap:
        assert len(chunk.bucket_groups) == 4
    return torch.cat([p.detach().view(-1) for p in chunk.parameters()]).tolist()


def _noted(dispatch: Any, number: int, starts: list[int]) -> Any:
    def noted() -> None:
        starts.append(number)
        dispatch()

    return noted


def test_idle_and_training_ranks_agree_on_the_order() -> None:
    first, second = run_megatron_ranks(2, _train, Setup(overlap=True, bucket_size=1), (1, 2))
    assert first == second
    (alone,) = run_megatron_ranks(1, _train, Setup(), (1,))
    assert torch.allclose(torch.tensor(first), torch.tensor(alone), rtol=1e-6, atol=1e-7)
