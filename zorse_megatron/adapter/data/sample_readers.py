"""Which chunks read samples, and how packed ones travel between chunks.

Stock lets the first stage read tokens and the last one labels. Two kinds of samples say more, which
every layer must know to compute what a single process computes: where documents end
(`--reset-attention-mask`; stock's middle stages attend across documents instead), and how sequences
are packed (`--sft`, `--dataloader-inter-document-masking`). With them every chunk reads samples.
"""

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.training import get_args

from zorse_megatron.adapter.groups.global_groups import presented


@dataclass(frozen=True, kw_only=True)
class SampleKind:
    """What the command's samples are like."""

    are_packed: bool = False
    """Whether a micro-batch is one long sequence (Megatron's "thd" format)."""
    every_chunk_reads: bool = False
    means_are_averaged: bool = False
    """Whether stock's `evaluate` averages means of micro-batches."""


def sample_kind(args: Namespace) -> SampleKind:
    """The kind of sample that stock's parsed arguments ask for."""
    packed = bool(args.sft or args.dataloader_inter_document_masking)
    masks = args.reset_attention_mask and args.create_attention_mask_in_dataloader
    return SampleKind(
        are_packed=packed,
        every_chunk_reads=bool(packed or masks),
        means_are_averaged=bool(args.sft),
    )


def with_middle_chunks(stock: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Wrap stock's `is_first_or_last_pipeline_stage`, by which scripts decide who reads."""

    def is_first_or_last_pipeline_stage(vp_stage: Any) -> bool:
        return sample_kind(get_args()).every_chunk_reads or stock(vp_stage)

    return is_first_or_last_pipeline_stage


def counting_each_chunk(
    stock: Callable[[], Any], *, loop: Any, num_chunks: int, device: torch.device
) -> Callable[[], Any]:
    """Wrap stock's `consume_seqlen_stats_in_iteration`, which sums over all ranks.

    `loop`: the module that keeps the sums. Stock divides by its stages, each of which has counted
    every sequence; here chunks have. And a rank without micro-batches has counted nothing, so it
    would not take part.
    """

    def consume_seqlen_stats_in_iteration() -> Any:
        if loop._seqlen_stats_in_iteration is None:
            loop._seqlen_stats_in_iteration = torch.zeros(2, dtype=torch.float64, device=device)
        loop._seqlen_stats_active = True
        with presented(parallel_state, "_MPU_PIPELINE_MODEL_PARALLEL_WORLD_SIZE", num_chunks):
            return stock()

    return consume_seqlen_stats_in_iteration


def one_sequence(activation: torch.Tensor) -> torch.Tensor:
    """[sequence, samples, hidden] as the layers of packed samples have it: [tokens, 1, hidden].

    Samples follow one another, as in `flatten_batch_for_packed_sequences`.
    """
    return activation.transpose(0, 1).reshape(-1, 1, activation.shape[2])


def by_samples(activation: torch.Tensor, num_samples: int) -> torch.Tensor:
    """The inverse of `one_sequence`; contiguous."""
    shape = (num_samples, -1, activation.shape[2])
    return activation.reshape(shape).transpose(0, 1).contiguous()
