"""Small training jobs that save and load checkpoints, under a plan or stock; run inside a rank."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.megatron import tiny_gpt
from tests.megatron.tiny_gpt import Setup
from zorse_megatron.adapter.patches.rebind import REGISTRY

PARTS = 6  # every job sums the gradients of as many parts, so all jobs train alike


@dataclass(frozen=True, kw_only=True)
class Job:
    """Groups of ranks, one per stage, with their shard weights; or one stock process."""

    groups: tuple[tuple[int, ...], ...] = ((0,),)
    weights: tuple[tuple[float, ...], ...] = ((1,),)
    stock: bool = False
    distributed_layout: bool = False
    fully_parallel: bool = False
    weights_only: bool = False  # loads as --finetune or --no-load-optim does
    constant_structure: bool = False  # saves three times, as --ckpt-assume-constant-structure

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return sum(map(len, self.groups))


def run_job(
    job: Job, setup: Setup, *, steps: Sequence[int], load: Path | None, save: Path | None
) -> dict[str, torch.Tensor]:
    """Load, train `steps`, save; returns this rank's weights by their name in the whole model."""
    tiny_gpt.start()
    stage, members = next((i, g) for i, g in enumerate(job.groups) if dist.get_rank() in g)
    if len(job.groups) > 1:
        setup = replace(setup, stage=stage, num_stages=len(job.groups), layers_per_stage=1)
    collection = tiny_gpt.groups_of(job.groups, setup)
    seed = 0 if load is None else 1  # loaded weights must not be the initial ones by chance
    if job.stock:
        distributed = {"use_distributed_optimizer": True} if job.distributed_layout else {}
        chunk, optimizer = tiny_gpt.make_stock(setup, seed=seed, **distributed)
    else:
        chunk, optimizer = tiny_gpt.make_ours(
            setup,
            collection,
            job.weights[stage],
            distributed_layout=job.distributed_layout,
            seed=seed,
        )
    tied = _tie(job, chunk, optimizer) if len(job.groups) > 1 and setup.tied else None
    if load is not None:
        _load(job, chunk, optimizer, collection, load)
    for step in steps:
        mine = range(members.index(dist.get_rank()), PARTS, len(members))
        tiny_gpt.set_gradients(chunk, setup, step=step, contributors=mine)
        tiny_gpt.reduce_and_step(chunk, optimizer, tied=tied)
    if save is not None:
        _save(job, chunk, optimizer, collection, save)
    return tiny_gpt.weights_of(chunk, setup)


def _tie(job: Job, chunk: Any, optimizer: Any) -> Any:
    from zorse_megatron.adapter.tied_embeddings import TiedEmbedding

    assert dist.group.WORLD is not None
    tied = TiedEmbedding(
        model_chunks=[chunk],
        first_ranks=job.groups[0],
        last_ranks=job.groups[-1],
        group=dist.group.WORLD,
    )
    tied.check_update_rule(optimizer)
    return tied


def _metadata(job: Job, collection: Any) -> dict:
    """What `megatron.training.checkpointing` makes of the flags."""
    metadata = {
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": collection.dp_cp,
    }
    if job.distributed_layout:
        metadata["distrib_optim_sharding_type"] = "fully_reshardable"
        metadata["distrib_optim_fully_reshardable_mem_efficient"] = False
    return metadata


def _save(job: Job, chunk: Any, optimizer: Any, collection: Any, directory: Path) -> None:
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies.fully_parallel import (
        FullyParallelSaveStrategyWrapper,
    )
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
    from megatron.core.utils import unwrap_model

    from zorse_megatron.adapter.checkpoint.saved_optimizer import PARALLEL_HOOKS

    strategy: Any = TorchDistSaveShardedStrategy(cached_metadata=job.constant_structure)
    if job.fully_parallel:
        strategy = FullyParallelSaveStrategyWrapper(
            strategy, collection.dp_cp, do_cache_distribution=job.constant_structure
        )
    for _ in range(3 if job.constant_structure else 1):
        metadata = _metadata(job, collection)
        state = {"model": unwrap_model(chunk).sharded_state_dict(metadata=metadata)}
        state["optimizer"] = optimizer.sharded_state_dict(state, metadata=metadata)
        if dist.get_rank() == 0:
            directory.mkdir()
        dist.barrier()
        del metadata["dp_cp_group"]
        with REGISTRY.applied({} if job.stock else PARALLEL_HOOKS):
            dist_checkpointing.save(state, str(directory), strategy, content_metadata=metadata)
        directory = directory.with_name(directory.name + "_next")


def _load(job: Job, chunk: Any, optimizer: Any, collection: Any, directory: Path) -> None:
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies.fully_parallel import (
        FullyParallelLoadStrategyWrapper,
    )
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy
    from megatron.core.utils import unwrap_model

    from zorse_megatron.adapter.checkpoint.saved_optimizer import PARALLEL_HOOKS

    metadata = dist_checkpointing.load_content_metadata(str(directory))
    assert metadata is not None
    metadata["dp_cp_group"] = collection.dp_cp
    request = {"model": unwrap_model(chunk).sharded_state_dict(metadata=metadata)}
    if not job.weights_only:
        request["optimizer"] = optimizer.sharded_state_dict(
            request, is_loading=True, metadata=metadata
        )
    strategy: Any = TorchDistLoadShardedStrategy()
    if job.fully_parallel:
        strategy = FullyParallelLoadStrategyWrapper(strategy, collection.dp_cp)
    with REGISTRY.applied({} if job.stock else PARALLEL_HOOKS):
        state = dist_checkpointing.load(request, str(directory), strategy)
    chunk.load_state_dict(state["model"])
    if job.weights_only:
        optimizer.reload_model_params()
    else:
        optimizer.load_state_dict(state["optimizer"])


def read_checkpoint(directory: Path) -> tuple[dict[str, torch.Tensor], dict]:
    """Everything in a checkpoint: tensors by key, and the common part. One rank."""
    tiny_gpt.start()
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.serialization import load_plain_tensors

    tensors = load_plain_tensors(str(directory))
    return tensors, dist_checkpointing.load_common_state_dict(str(directory))
