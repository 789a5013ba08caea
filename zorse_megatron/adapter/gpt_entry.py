"""GPT pretraining on the pip-installed Megatron alone: its data sets, micro-batches and loss.

Counterpart of `pretrain_gpt.py`, which is in the Megatron-LM repository and not in the wheel: same
flags, same loss, same order of calls. What it leaves out it refuses by name (`flags/flags.yaml`).
"""

import json
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import megatron
import megatron.training
import torch
from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.utils import (
    StragglerDetector,
    get_attr_wrapped_model,
    get_batch_on_this_cp_rank,
    get_batch_on_this_tp_rank,
)
from megatron.training import (
    get_args,
    get_timers,
    inprocess_restart,
    print_rank_0,
    set_startup_timestamps,
    utils,
)
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from megatron.training.utils import get_blend_and_blend_per_split

from zorse_megatron.errors import FlagError
from zorse_megatron.flags.check import check_own_entry

LossReport = tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]

# A loss this many times the largest one seen is a spike (`SPIKY_LOSS_FACTOR` in pretrain_gpt.py).
SPIKE_FACTOR = 10

_straggler = StragglerDetector()


def refuse_left_out(args: Namespace) -> None:
    """Raise a FlagError that names every flag given that this entry cannot honour."""
    problems = check_own_entry(args)
    if problems:
        raise FlagError("The GPT entry does not know these flags", problems)


def loss_func(
    loss_mask: torch.Tensor, output_tensor: torch.Tensor, model: Any = None
) -> LossReport:
    """Sum the losses of the tokens that count.

    Returns the sum, the number of those tokens, and both again in one tensor for stock's report,
    which divides one by the other after adding them up over the data-parallel ranks.
    """
    counts = loss_mask.view(-1).float()
    loss = torch.sum(output_tensor.view(-1).float() * counts)
    num_tokens = counts.sum().clone().detach().to(torch.int)
    _validate(loss)
    report = torch.cat([loss.clone().detach().view(1), num_tokens.view(1)])
    return loss, num_tokens, {"lm loss": report}


def _validate(loss: torch.Tensor) -> None:
    """Let stock's rerun state machine check the loss before it is averaged away."""
    args = get_args()
    rerun = get_rerun_state_machine()
    # Tolerance 0: a forward pass that is run again gives the same loss.
    if args.check_for_nan_in_loss_and_grad:
        for name, is_bad in (("NaN", torch.isnan), ("Inf", torch.isinf)):
            rerun.validate_result(
                result=loss,
                rejection_func=is_bad,
                message=f"found {name} in local forward loss calculation",
                tolerance=0.0,
                fatal=True,
            )
    if args.check_for_spiky_loss:
        rerun.validate_result(
            result=loss,
            rejection_func=partial(
                rerun.is_unexpectedly_large, threshold=SPIKE_FACTOR, context="loss"
            ),
            message="Spiky loss",
            tolerance=0.0,
            fatal=False,
        )


def forward_step(
    data_iterator: Iterator[Any] | None, model: Any
) -> tuple[torch.Tensor, Callable[[torch.Tensor], LossReport]]:
    """Run one microbatch through this rank's model chunk."""
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    with _straggler(bdata=True):
        batch = get_batch(data_iterator, get_attr_wrapped_model(model, "vp_stage"))
    timers("batch-generator").stop()
    with _straggler:
        output = model(
            batch["tokens"],
            batch["position_ids"],
            batch["attention_mask"],
            labels=batch["labels"],
            loss_mask=batch["loss_mask"],
        )
    return output, partial(loss_func, batch["loss_mask"], model=model)


def get_embedding_ranks(pp_ranks: list[int]) -> list[int]:
    """Return the ranks of one pipeline that hold word embeddings: the first, and if tied the last.

    Stock's default counts the last rank in every case.
    """
    if get_args().untie_embeddings_and_output_weights:
        return [pp_ranks[0]]
    return sorted({pp_ranks[0], pp_ranks[-1]})


def main(program_start_s: float | None = None) -> None:
    """Parse `sys.argv` as stock does and train.

    `program_start_s` (seconds since the epoch) feeds stock's start-up report; without it the
    report starts here.
    """
    entered_s = time.time()
    set_startup_timestamps(program_start=program_start_s or entered_s, main_entry=entered_s)
    # Looked up now and not imported above: the plan executor binds this name to its own.
    pretrain, store = inprocess_restart.maybe_wrap_for_inprocess_restart(megatron.training.pretrain)
    args = parse_and_validate_args(args_defaults={"tokenizer_type": "GPT2BPETokenizer"})
    refuse_left_out(args)
    pretrain(
        pretrain_cfg_container_from_args(args, gpt_config_from_args(args)),
        train_valid_test_datasets_provider,
        ModelType.encoder_or_decoder,
        forward_step,
        store=store,
        get_embedding_ranks=get_embedding_ranks,
    )


# Data of the GPT pretraining entry: datasets, and one microbatch on one rank.
#
# Counterpart of `train_valid_test_datasets_provider` and `get_batch` in Megatron-LM's
# `pretrain_gpt.py`, for plain pretraining: `gpt_entry` refuses the flags that need more.


# Tensors, and None for what this rank has no use for.
Batch = dict[str, Any]

BATCH_KEYS = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")

# Fields of GPTDatasetConfig and the stock argument that each one takes.
_DATASET_FIELDS = {
    "random_seed": "seed",
    "sequence_length": "seq_length",
    "split": "split",
    "multiple_validation_sets": "multiple_validation_sets",
    "full_validation": "full_validation",
    "num_dataset_builder_threads": "num_dataset_builder_threads",
    "path_to_cache": "data_cache_path",
    "mmap_bin_files": "mmap_bin_files",
    "reset_position_ids": "reset_position_ids",
    "reset_attention_mask": "reset_attention_mask",
    "eod_mask_loss": "eod_mask_loss",
    "create_attention_mask": "create_attention_mask_in_dataloader",
    "object_storage_cache_path": "object_storage_cache_path",
    "mid_level_dataset_surplus": "mid_level_dataset_surplus",
    "allow_ambiguous_pad_tokens": "allow_ambiguous_pad_tokens",
    "fast_cache_load": "dataloader_fast_cache_load",
    "defer_npy_index_mmap": "dataloader_defer_npy_index_mmap",
    "context_parallel_size": "context_parallel_size",
    "data_parallel_size": "data_parallel_size",
}


def dataset_config(args: Namespace) -> GPTDatasetConfig:
    """Build the dataset config from stock's parsed arguments."""
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    sequences_per_dataset = None
    if args.per_dataset_sequences_path is not None:
        with open(args.per_dataset_sequences_path) as file:
            sequences_per_dataset = json.load(file)
    return GPTDatasetConfig(
        tokenizer=build_tokenizer(args),
        blend=blend,
        blend_per_split=blend_per_split,
        sequences_per_dataset=sequences_per_dataset,
        sequence_parallel_size=args.tensor_model_parallel_size * args.sequence_parallel,
        **{field: getattr(args, argument) for field, argument in _DATASET_FIELDS.items()},
    )


def is_dataset_built_on_rank(vp_stage: int | None = None) -> bool:
    """Whether this rank reads data: tensor-parallel rank 0 of the first and the last stage."""
    if parallel_state.get_tensor_model_parallel_rank() != 0:
        return False
    return bool(utils.is_first_or_last_pipeline_stage(vp_stage))


def train_valid_test_datasets_provider(
    train_val_test_num_samples: list[int], vp_stage: int | None = None
) -> tuple[Any, Any, Any]:
    """Build the three datasets with the sizes that stock asks for."""
    args = get_args()
    dataset_type = MockGPTDataset if args.mock_data else GPTDataset
    print_rank_0("> building train, validation, and test datasets for GPT ...")
    train, valid, test = BlendedMegatronDatasetBuilder(
        dataset_type,
        train_val_test_num_samples,
        partial(is_dataset_built_on_rank, vp_stage=vp_stage),
        dataset_config(args),
    ).build()
    print_rank_0("> finished creating GPT datasets ...")
    return train, valid, test


# Stock builds the datasets on every rank that the provider says, not on rank 0 of each TP group
# alone, when the provider carries this mark (`training/training.py`).
train_valid_test_datasets_provider.is_distributed = True  # type: ignore[attr-defined]


def get_batch(data_iterator: Iterator[Any] | None, vp_stage: int | None = None) -> Batch:
    """Return this rank's share of the next microbatch; all None on a middle stage."""
    if not utils.is_first_or_last_pipeline_stage(vp_stage):
        return dict.fromkeys(BATCH_KEYS)
    args = get_args()
    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    batch: Batch = {}
    if tp_rank == 0:
        assert data_iterator is not None, "stock gives an iterator to every rank that reads data"
        sample = next(data_iterator)
        for key in BATCH_KEYS:
            tensor = sample.get(key)
            batch[key] = None if tensor is None else tensor.cuda(non_blocking=True)
    batch = get_batch_on_this_tp_rank(
        batch,
        has_cu_seqlens=False,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=parallel_state.get_tensor_model_parallel_src_rank(),
        broadcast_group=parallel_state.get_tensor_model_parallel_group(),
        cp_size=args.context_parallel_size,
        tp_rank=tp_rank,
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=False,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=parallel_state.is_pipeline_first_stage(),
        is_pipeline_last_stage=parallel_state.is_pipeline_last_stage(),
    )
    batch = {key: batch[key] for key in BATCH_KEYS}
    if args.context_parallel_size == 1:
        return batch
    return get_batch_on_this_cp_rank(
        batch, is_hybrid_cp=False, cp_group=parallel_state.get_context_parallel_group()
    )
