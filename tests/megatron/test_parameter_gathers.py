"""A UNSHARD after a step only starts; who computes with parameters waits for them."""

import time
from typing import Any

import pytest
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
    chunk = tiny_gpt.wrap(model, setup, collection, (3, 1))
    with torch.no_grad():
        for parameter in chunk.parameters():
            chunk.parameter_piece(parameter, *chunk.owned_part(parameter)).add_(1 + dist.get_rank())
    return chunk


def _gather_at_once(setup: Setup) -> list[float]:
    chunk = _stepped_chunk(setup)
    for group in reversed(chunk.bucket_groups):
        for bucket in group.buckets:
            group.gather_bucket(bucket).wait()
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


def _sections(setup: Setup) -> list[set[str]]:
    """What the buckets of a sharded chunk have, in the order of gathers."""
    from zorse_megatron.adapter.data_parallel.buckets import bucket_per_layer

    tiny_gpt.start()
    collection = tiny_gpt.groups_of([[0, 1]], setup)
    model = tiny_gpt.build_gpt(setup, collection)
    chunk = tiny_gpt.wrap(model, setup, collection, (3, 1))
    name_of = {id(parameter): name for name, parameter in chunk.module.named_parameters()}
    layouts = bucket_per_layer(chunk.module, chunk.ddp_config, collection).layouts.values()
    buckets: list[set[str]] = []
    for layout in layouts:
        found: list[set[str]] = [set() for _ in layout.bucket_indices]
        taken = [0] * len(found)
        for parameter, (start, stop, number) in layout.param_index_map.items():
            first, end = layout.bucket_indices[number]
            assert first <= start < stop <= end and stop - start == parameter.numel()
            found[number].add(name_of[id(parameter)])
            taken[number] = max(taken[number], stop - first)
        assert taken == layout.per_bucket_numel_unpadded
        edges = [edge for bounds in layout.bucket_indices for edge in bounds]
        assert edges == sorted(edges) and edges[1:-1:2] == edges[2::2]
        assert sorted(layout.param_indices) == list(range(len(layout.param_index_map)))
        buckets += reversed(found)
    return buckets


@pytest.mark.parametrize("tied", [True, False])
def test_buckets_of_sharded_chunks_end_where_layers_do(tied: bool) -> None:
    """The head is smaller than a layer; a final norm goes with the last one where it is alone."""
    buckets, others = run_megatron_ranks(2, _sections, Setup(tied=tied))
    assert buckets == others
    norm = {"decoder.final_layernorm.weight", "decoder.final_layernorm.bias"}
    sections = [{_section(name) for name in bucket - norm} for bucket in buckets]
    ends = [] if tied else [{"output_layer"}]
    assert sections[-2 - len(ends) :] == [{"layers.0"}, {"layers.1"}, *ends]
    assert all(section == {"embedding"} for section in sections[: -2 - len(ends)])
    assert norm <= buckets[-1]


def _section(name: str) -> str:
    first, *others = name.split(".")
    return ".".join(others[:2]) if first == "decoder" else first
