"""Data of the GPT pretraining entry: datasets, and one microbatch on one rank.

Counterpart of `train_valid_test_datasets_provider` and `get_batch` in Megatron-LM's
`pretrain_gpt.py`, for plain pretraining: `gpt_entry` refuses the flags that need more.
"""

import json
from argparse import Namespace
from collections.abc import Iterator
from functools import partial
from typing import Any

from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.utils import get_batch_on_this_cp_rank, get_batch_on_this_tp_rank
from megatron.training import get_args, print_rank_0, utils
from megatron.training.utils import get_blend_and_blend_per_split

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
