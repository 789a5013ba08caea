"""A GATHER after a step only starts; who computes with parameters waits for them."""

import time
from typing import Any

import torch
import torch.distributed as dist

from tests.megatron import tiny_gpt
from tests.megatron.preloaded import run_megatron_ranks
from tests.megatron.tiny_gpt import SEQUENCE, Setup

LAYERS = Setup(overlap=True, bucket_size=3000)


def _stepped_chunk(setup: Setup) -> Any:
    """A chunk of which each owner has changed what it owns, and nobody else knows."""
    tiny_gpt.start()
    collection = tiny_gpt.groups_of([[0, 1]], setup)
    model = tiny_gpt.build_gpt(setup, collection)
    # As under a plan, which turns --overlap-param-gather off.
    chunk = tiny_gpt.wrap(model, setup, collection, (3, 1), overlap_param_gather=False)
    with torch.no_grad():
        for parameter in chunk.parameters():
            chunk.parameter_piece(parameter, *chunk.owned_part(parameter)).add_(1 + dist.get_rank())
    return chunk


def _gather_at_once(setup: Setup) -> list[float]:
    chunk = _stepped_chunk(setup)
    chunk.start_param_sync()
    return [parameter.sum().item() for parameter in chunk.parameters()]


def _gather_one_after_the_other(setup: Setup) -> list[float]:
    """Rank 1 starts only when rank 0 has told it that it goes on."""
    chunk = _stepped_chunk(setup)
    told = torch.zeros(1)
    if dist.get_rank() == 1:
        dist.recv(told, 0)
    chunk.gathers.start()
    if dist.get_rank() == 0:
        dist.send(told, 1)
    chunk.gathers.wait()
    return [parameter.sum().item() for parameter in chunk.parameters()]


def _compute_while_gathering(setup: Setup) -> list[list[float]]:
    """The values of each module's parameters when its forward begins, in the order of forwards."""
    chunk = _stepped_chunk(setup)
    seen = []

    def look(module: torch.nn.Module, _inputs: Any) -> None:
        seen.append([parameter.sum().item() for parameter in module.parameters(recurse=False)])

    for module in chunk.module.modules():
        if next(module.parameters(recurse=False), None) is not None:
            module.register_forward_pre_hook(look)
    time.sleep(0.1 * dist.get_rank())
    chunk.gathers.start()
    tokens = torch.zeros(1, SEQUENCE, dtype=torch.long)
    mask = torch.ones(1, 1, SEQUENCE, SEQUENCE).triu(1).bool()
    chunk(input_ids=tokens, position_ids=tokens, attention_mask=mask)
    expected = [
        [parameter.sum().item() for parameter in module.parameters(recurse=False)]
        for module in chunk.module.modules()
        if next(module.parameters(recurse=False), None) is not None
    ]
    assert sorted(seen) == sorted(expected)
    return seen


def test_a_gather_that_has_begun_lets_the_rank_go_on() -> None:
    expected = run_megatron_ranks(2, _gather_at_once, LAYERS)
    assert expected[0] == expected[1]
    assert run_megatron_ranks(2, _gather_one_after_the_other, LAYERS) == expected


def test_a_module_computes_with_the_parameters_that_are_gathered() -> None:
    first, second = run_megatron_ranks(2, _compute_while_gathering, LAYERS)
    assert first == second and len(first) > 4
