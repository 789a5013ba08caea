"""Chunk by chunk, an update leaves the weights and the state of one whole step, to the bit."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.megatron import tiny_gpt
from tests.megatron.fused_adam import fused_adam
from tests.megatron.preloaded import run_megatron_ranks
from tests.megatron.tiny_gpt import Setup
from zorse_megatron.errors import FlagError

STEPS = 4
OVERFLOWS_AT = 2
CLIPPED = Setup(clip_grad=0.5, tied=False, num_stages=2)
CASES = {
    "fp32": (CLIPPED, ""),
    "bf16, fused Adam": (replace(CLIPPED, dtype=torch.bfloat16, fused_adam=True), ""),
    "fp16, one step overflows": (replace(CLIPPED, dtype=torch.float16), "overflow"),
    "norms beyond the threshold are skipped": (
        replace(CLIPPED, grad_norm_skip_threshold=30.0),
        "large",
    ),
    "in one pass, in 16 bits": (replace(CLIPPED, dtype=torch.float16), "overflow, one pass"),
    "state in the host": (replace(CLIPPED, dtype=torch.bfloat16), "host"),
    "a part of the state in the host": (replace(CLIPPED, dtype=torch.bfloat16), "host, part"),
    "state of a fused Adam in the host": (replace(CLIPPED, fused_adam=True), "host"),
}


def _optimizer(setup: Setup, chunks: list[Any], collection: Any, case: str) -> Any:
    from zorse_megatron.adapter.checkpoint.saved_optimizer import CheckpointLayout
    from zorse_megatron.adapter.optimizer.distributed_optimizer import build_uneven_optimizer
    from zorse_megatron.adapter.optimizer.shard_update import choose_update
    from zorse_megatron.runtime.host_link import HostLink

    with fused_adam(setup.fused_adam):
        optimizer = build_uneven_optimizer(
            tiny_gpt.optimizer_config(setup),
            chunks,
            pg_collection=collection,
            checkpoint_layout=CheckpointLayout.REPLICATED,
            state_waits="host" in case,
        )
    (mine,) = optimizer.chained_optimizers
    if "one pass" in case:
        choose_update(mine, "fused", torch.device("cpu"))
    if "host" in case:

        class SmallPieces(HostLink):
            def piece_sizes(self, shards: Any) -> list[int]:
                whole, rest = divmod(sum(each.tensor.numel() for each in shards), 500)
                return [500] * whole + [rest]

        part = "part" in case
        mine.keep_in_host(
            (SmallPieces if part else HostLink)(torch.device("cpu")),
            optimizer_state=True,
            state_fraction=0.6 if part else None,
            gradients=None,
            on_change=lambda: None,
        )
    return optimizer


def _train(setup: Setup, case: str, by_chunk: bool) -> tuple[list[Any], list[Any]]:
    """What each step returns, and then what this rank owns: parameters and their state."""
    tiny_gpt.start()
    collection = tiny_gpt.groups_of([[0, 1]], setup)
    setups = [replace(setup, stage=stage) for stage in (0, 1)]
    models = [tiny_gpt.build_gpt(each, collection) for each in setups]
    chunks = [
        tiny_gpt.wrap(model, each, collection, (3, 1))
        for model, each in zip(models, setups, strict=True)
    ]
    optimizer = _optimizer(setup, chunks, collection, case)
    (mine,) = optimizer.chained_optimizers
    said = []
    for step in range(STEPS):
        scale = optimizer.get_loss_scale().item()
        if step == OVERFLOWS_AT:
            scale *= float("inf") if "overflow" in case else 100.0 if "large" in case else 1.0
        for chunk, each in zip(chunks, setups, strict=True):
            rank = [dist.get_rank()]
            tiny_gpt.set_gradients(chunk, each, step=step, contributors=rank, scale=scale)
            chunk.finish_grad_sync()
        tiny_gpt.sum_before_step(optimizer, 1 / 8)
        success, norm, _ = optimizer.step()
        said.append((success, None if norm is None else float(norm)))
        if success and not by_chunk:
            _step_all(mine)
        for chunk in chunks:
            if by_chunk:
                mine.step_chunk(chunk)
            tiny_gpt.gather(chunk)
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        if "part" in case and by_chunk:
            stays = [memory for each in mine.host_state.states for memory in each.stays]
            assert stays and not any(memory.is_away for memory in stays)
            if step == 1:  # as where a checkpoint is saved: what stays is in the host then
                assert mine.read(mine.owned_shards[0][-1]).numel()
                assert sum(memory.is_away for memory in stays)
    held = [parameter.data for chunk in chunks for parameter in chunk.parameters()]
    for *_, shard in mine.owned_shards:
        state = mine.optimizer.state[shard]
        held += [mine.read(each) for each in (shard, state["exp_avg"], state["exp_avg_sq"])]
        held.append(torch.as_tensor(state.get("step", 0)))
    groups = mine.optimizer.param_groups
    said += [[group.get("step") for group in groups], mine.step_count]
    return said, [each.double().tolist() for each in held]  # every number as it is


def _step_all(optimizer: Any) -> None:
    """The inner optimizer's own step, once for all chunks."""
    optimizer.optimizer.step()
    for chunk in optimizer.model_chunks if not optimizer.copies_in_step else ():
        optimizer.copy_main_to_model(chunk)


Trained = dict[str, tuple[tuple[list[Any], list[Any]], ...]]
"""Case -> what one rank has of a whole step, and of an update by chunk."""


def _train_all() -> Trained:
    return {
        name: (_train(setup, case.replace("host", ""), False), _train(setup, case, True))
        for name, (setup, case) in CASES.items()
    }


@pytest.fixture(scope="module")
def trained() -> list[Trained]:
    """By rank."""
    return run_megatron_ranks(2, _train_all)


@pytest.mark.parametrize("name", CASES)
def test_an_update_by_chunk_is_that_of_one_step(name: str, trained: list[Trained]) -> None:
    setup, case = CASES[name]
    for of_rank in trained:
        (expected, values), (said, held) = of_rank[name]
        assert said == expected
        assert held == values and len(held) > 20
        norms = [norm for _, norm in said[:STEPS] if norm is not None]
        assert min(norms) > setup.clip_grad, "clipping must be at work in each step"
        skipped = "overflow" in case or "large" in case
        assert [success for success, _ in said[:STEPS]].count(False) == skipped


def _refusal() -> str:
    from zorse_megatron.adapter.optimizer.shard_update import choose_update

    adam = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))])
    stock = SimpleNamespace(optimizer=adam, muon=None)
    with pytest.raises(FlagError) as caught:
        choose_update(stock, "fused", torch.device("cpu"), streams=True)
    return str(caught.value)


def test_one_pass_is_refused_where_gradients_come_from_the_host() -> None:
    (said,) = run_megatron_ranks(1, _refusal)
    assert "fused, while the plan offloads gradients" in said
