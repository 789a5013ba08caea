"""A tiny GPT on real ranks without a training loop: model, DDP wrapper, optimizer, ours, stock's.

Functions here run inside a rank (see `tests.ranks.harness`). Call `start` first.
"""

import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from tests.megatron.fused_adam import fused_adam
from zorse_megatron.adapter import cpu_mode

VOCAB = 96
SEQUENCE = 8


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What differs between tests: precision, clipping, overlap, layers of this stage."""

    dtype: torch.dtype = torch.float32
    clip_grad: float = 0.0
    grad_norm_skip_threshold: float = float("inf")
    fused_adam: bool = False
    overlap: bool = False
    bucket_size: int | None = None
    tied: bool = True
    grad_reduce_in_fp32: bool = True
    stage: int = 0
    num_stages: int = 1
    layers_per_stage: int = 2


def start() -> None:
    """Enable CPU mode and, once, set up Megatron's random state and global groups (world = DP)."""
    cpu_mode.enable()
    from megatron.core import parallel_state, tensor_parallel

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(7)


def groups_of(groups: Sequence[Sequence[int]], setup: Setup) -> Any:
    """The process groups of this rank when `groups` are the data-parallel groups of a job."""
    from zorse_megatron.adapter.groups.process_groups import (
        PipelinePosition,
        PlanGroups,
        collection_of,
    )

    rank = dist.get_rank()
    created = [dist.new_group(list(ranks)) for ranks in groups]
    alone = [dist.new_group([r]) for r in range(dist.get_world_size())][rank]
    (mine,) = [g for g, ranks in zip(created, groups, strict=True) if rank in ranks]
    assert dist.group.WORLD is not None
    return collection_of(
        PlanGroups(
            group=mine,
            replica=alone,
            tp_group=alone,
            everyone=mine,
            alone=alone,
            world=dist.group.WORLD,
            position=PipelinePosition(setup.stage, setup.num_stages),
        )
    )


def build_gpt(setup: Setup, collection: Any, seed: int = 0) -> Any:
    """A GPT stage with SwiGLU in `setup.dtype`; the same seed gives the same weights."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.module import Float16Module

    config = TransformerConfig(
        num_layers=setup.layers_per_stage * setup.num_stages,
        pipeline_model_parallel_size=setup.num_stages,
        pipeline_dtype=setup.dtype,
        hidden_size=24,
        ffn_hidden_size=40,
        num_attention_heads=2,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        calculate_per_token_loss=True,
        params_dtype=setup.dtype,
        bf16=setup.dtype is torch.bfloat16,
        fp16=setup.dtype is torch.float16,
        gradient_accumulation_fusion=False,
        use_cpu_initialization=True,
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        vocab_size=VOCAB,
        max_sequence_length=SEQUENCE,
        pre_process=setup.stage == 0,
        post_process=setup.stage == setup.num_stages - 1,
        share_embeddings_and_output_weights=setup.tied,
        pg_collection=collection,
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "layernorm" not in name:
                parameter.copy_(
                    0.1 * torch.randn(parameter.shape, generator=_dice(setup, name, seed))
                )
    return model if setup.dtype is torch.float32 else Float16Module(config, model)


def whole_name(setup: Setup, name: str) -> str:
    """A parameter's name in the whole model, without wrappers."""
    name = name.replace("module.", "")
    if match := re.match(r"decoder\.layers\.(\d+)(.*)", name):
        return f"decoder.layers.{int(match[1]) + setup.stage * setup.layers_per_stage}{match[2]}"
    return name


def _dice(setup: Setup, name: str, seed: int) -> torch.Generator:
    """Random numbers of one parameter, the same in every layout and in both tied copies."""
    name = whole_name(setup, name)
    if setup.tied and name == "output_layer.weight":
        name = "embedding.word_embeddings.weight"
    return torch.Generator().manual_seed(zlib.crc32(f"{name} {seed}".encode()))


def wrap(
    model: Any, setup: Setup, collection: Any, weights: Sequence[float] | None, **options: Any
) -> Any:
    """Our DDP wrapper with shard weights, or stock's without distributed optimizer."""
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
    )
    from megatron.core.utils import get_model_config

    from zorse_megatron.adapter.data_parallel.ddp import UnevenDistributedDataParallel

    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=setup.grad_reduce_in_fp32,
        overlap_grad_reduce=setup.overlap,
        bucket_size=setup.bucket_size,
        check_for_nan_in_grad=setup.dtype is not torch.float16,
        **{
            "use_distributed_optimizer": weights is not None,
            **options,
        },
    )
    arguments = {
        "config": get_model_config(model),
        "ddp_config": ddp_config,
        "module": model,
        "pg_collection": collection,
    }
    if weights is None:
        return DistributedDataParallel(**arguments)
    return UnevenDistributedDataParallel(**arguments, shard_weights=weights)


def optimizer_config(setup: Setup, **options: Any) -> Any:
    """AdamW; fp16 with a loss scale that halves at every overflow."""
    from megatron.core.optimizer import OptimizerConfig

    return OptimizerConfig(
        lr=1e-2,
        min_lr=1e-4,
        weight_decay=0.1,
        clip_grad=setup.clip_grad,
        bf16=setup.dtype is torch.bfloat16,
        fp16=setup.dtype is torch.float16,
        params_dtype=setup.dtype,
        initial_loss_scale=2.0**10,
        hysteresis=1,
        log_num_zeros_in_grad=True,
        grad_norm_skip_threshold=setup.grad_norm_skip_threshold,
        **{"optimizer": "adam", **options},
    )


def make_ours(
    setup: Setup,
    collection: Any,
    weights: Sequence[float],
    *,
    distributed_layout: bool = False,
    seed: int = 0,
) -> tuple[Any, Any]:
    """Our wrapped chunk and optimizer."""
    chunk = wrap(build_gpt(setup, collection, seed), setup, collection, weights)
    return chunk, build_ours(setup, chunk, collection, distributed_layout=distributed_layout)


def build_ours(
    setup: Setup,
    chunk: Any,
    collection: Any,
    *,
    distributed_layout: bool = False,
    config_overrides: Any = None,
    **options: Any,
) -> Any:
    """Our optimizer for a wrapped chunk; `options` are fields of its config."""
    from zorse_megatron.adapter.checkpoint.saved_optimizer import CheckpointLayout
    from zorse_megatron.adapter.optimizer.distributed_optimizer import build_uneven_optimizer

    with fused_adam(setup.fused_adam):
        return build_uneven_optimizer(
            optimizer_config(setup, **options),
            [chunk],
            config_overrides,
            pg_collection=collection,
            checkpoint_layout=CheckpointLayout.of(distributed=distributed_layout),
        )


def make_stock(
    setup: Setup, *, seed: int = 0, use_distributed_optimizer: bool = False
) -> tuple[Any, Any]:
    """Stock's wrapped chunk and optimizer, alone on this rank."""
    from megatron.core.optimizer import get_megatron_optimizer

    from zorse_megatron.adapter.groups.process_groups import (
        PipelinePosition,
        PlanGroups,
        collection_of,
    )

    alone = [dist.new_group([r]) for r in range(dist.get_world_size())][dist.get_rank()]
    collection = collection_of(
        PlanGroups(
            group=alone,
            replica=alone,
            tp_group=alone,
            everyone=alone,
            alone=alone,
            world=alone,
            position=PipelinePosition(0, 1),
        )
    )
    setup = replace(setup, overlap=False)
    distributed = {"use_distributed_optimizer": use_distributed_optimizer}
    chunk = wrap(build_gpt(setup, collection, seed), setup, collection, None, **distributed)
    with fused_adam(setup.fused_adam):
        optimizer = get_megatron_optimizer(
            optimizer_config(setup, **distributed),
            [chunk],
            use_gloo_process_groups=False,
            pg_collection=collection,
        )
    return chunk, optimizer


def set_gradients(
    chunk: Any, setup: Setup, *, step: int, contributors: Sequence[int], scale: float = 1.0
) -> None:
    """Add the gradients of `contributors` (numbers of parts) to the chunk's gradient buffers.

    The parts are multiples of 1/64, so that they sum to the same bits in any order. A tied
    embedding that is in one chunk gets the gradients of both of its uses.
    """
    for name, parameter in chunk.named_parameters():
        uses = [whole_name(setup, name)]
        if uses == ["embedding.word_embeddings.weight"] and setup.tied and setup.num_stages == 1:
            uses.append("output_layer.weight")
        for use in uses:
            for part in contributors:
                seed = zlib.crc32(f"{use} {step} {part}".encode())
                dice = torch.Generator().manual_seed(seed)
                gradient = torch.randint(-64, 65, parameter.shape, generator=dice) / 64
                parameter.main_grad.add_((gradient * scale).to(parameter.main_grad.dtype))


def reduce_and_step(
    chunk: Any, optimizer: Any, *, divide_by: float = 8.0, tied: Any = None
) -> tuple[Any, Any, Any]:
    """What `train_step` does after the backward; returns success, norm and number of zeros."""
    chunk.finish_grad_sync()
    if tied is not None:
        tied.reduce()
    if not hasattr(chunk, "gathers"):
        chunk.scale_gradients(1.0 / divide_by)
        result = optimizer.step()
    else:  # ours: the list's SCALE, NORM, steps and gathers
        sum_before_step(optimizer, 1.0 / divide_by)
        result = optimizer.step()
        for each in optimizer.chained_optimizers:
            each.step_chunk(chunk)
        gather(chunk)
    chunk.zero_grad_buffer()
    optimizer.zero_grad()
    return result


def sum_before_step(optimizer: Any, factor: float) -> None:
    """What all ranks sum of their gradients, which are to be multiplied by `factor`."""
    from zorse_megatron.adapter.step_sums import StepSums

    sums = StepSums()
    (mine,) = optimizer.chained_optimizers
    found = sums.add(mine.factors.read())
    sums.reduce(dist.group.WORLD)
    mine.factors.know(found, torch.tensor(factor))


def gather(chunk: Any) -> None:
    """Gather our chunk's parameters from their owners."""
    chunk.gathers.start()
    chunk.gathers.wait()


def weights_of(chunk: Any, setup: Setup) -> dict[str, torch.Tensor]:
    """Copies of all parameters in fp32, by name in the whole model."""
    return {
        whole_name(setup, name): parameter.detach().float().clone()
        for name, parameter in chunk.named_parameters()
    }
