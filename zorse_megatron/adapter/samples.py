"""Each replica reads exactly its samples of Megatron's global order, where chunks need them.

Stock's own sampler, told that it is the only data-parallel rank, yields the order in which a
single process would consume the data set. That stream is cut into global batches, and of each
global batch a replica takes the intervals that its plan gives it. So every plan consumes the same
samples in the same step as a single process, for every sampler that stock has.
"""

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import chain, count
from typing import Any

import torch
import torch.utils.data
from megatron.core import parallel_state
from megatron.training import get_args

from zorse_megatron.adapter.groups.global_groups import presented
from zorse_megatron.flags.model_in_flags import packs_samples
from zorse_megatron.runtime.batch_sampler import MicroBatchAssignment, PlanBatchSampler

LoaderBuilder = Callable[[Any, int], Any]


def plan_loader_builder(
    stock: LoaderBuilder, *, assignment: MicroBatchAssignment, begin: Callable[[int], None]
) -> LoaderBuilder:
    """Wrap stock's `build_pretraining_data_loader` so that its loaders follow the plan.

    `assignment`: of the training, whose loader stock builds first; evaluations stay as the plan's
    file has them. `begin`: told how many samples training has consumed before.
    """
    whole = partial(MicroBatchAssignment, assignment.at(0), batch_size=assignment.size_at(0))
    assignments = chain([assignment], (whole() for _ in count()))

    def build_pretraining_data_loader(dataset: Any, consumed_samples: int) -> Any:
        # Its rank 0 of 1 is the global order of samples.
        with presented(parallel_state, _MPU_DATA_PARALLEL_RANK=0):
            loader = stock(dataset, consumed_samples)
        own = next(assignments)
        if own is assignment:
            begin(consumed_samples)
        if loader is None or not own.at(0):
            return loader
        sampler: Any = PlanBatchSampler(
            loader.batch_sampler,
            assignment=own,
        )
        # A loader's sampler cannot be replaced, so the loader is built again around ours.
        return torch.utils.data.DataLoader(
            loader.dataset,
            batch_sampler=sampler,
            num_workers=loader.num_workers,
            pin_memory=loader.pin_memory,
            persistent_workers=loader.persistent_workers,
            worker_init_fn=loader.worker_init_fn,
            collate_fn=partial(_collated, loader.collate_fn, loader.dataset),
        )

    return build_pretraining_data_loader


def _collated(stock: Callable[..., Any], dataset: Any, samples: list[Any]) -> Any:
    """Stock's; a rank that shares experts and has no samples gets batches of none.

    These are not packed: stock cannot join the lengths of no samples.
    """
    if samples:
        return stock(samples)
    batch = stock([dataset[0]])
    batch.pop("cu_seqlens", None)
    return {name: values[:0] for name, values in batch.items()}


def datasets_on_rank_0(stock: Callable[..., Any], *, rank: int) -> Callable[..., Any]:
    """Wrap stock's `build_train_valid_test_datasets`: rank 0 builds whatever stage it is on.

    Stock takes it for granted that rank 0 is on the first stage: rank 0 alone writes the index
    files that the others read, and decides for all whether there is anything to train on.
    """

    def build_train_valid_test_datasets(*args: Any, **kwargs: Any) -> Any:
        if rank:
            return stock(*args, **kwargs)
        with presented(parallel_state, _MPU_PIPELINE_MODEL_PARALLEL_RANK=0):
            return stock(*args, **kwargs)

    return build_train_valid_test_datasets


# Which chunks read samples, and how packed ones travel between chunks.
#
# Stock lets the first stage read tokens and the last one labels. Two kinds of samples say more,
# which every layer must know to compute what a single process computes: where documents end
# (`--reset-attention-mask`; stock's middle stages attend across documents instead), and how
# sequences are packed (`--sft`, `--dataloader-inter-document-masking`). With them every chunk reads
# samples.


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
    packed = packs_samples(args)
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
        with presented(parallel_state, _MPU_PIPELINE_MODEL_PARALLEL_WORLD_SIZE=num_chunks):
            return stock()

    return consume_seqlen_stats_in_iteration


def attending_within_sequences(stock: Any) -> Any:
    """A subclass of stock's `DotProductAttention` that takes packed samples, as stock's does not.

    Each sequence attends by itself, with stock's arithmetic and causal mask, so that packing costs
    neither the time nor the memory of scores between sequences: lengths squared, added up. Samples
    of one sequence each need no more than those that are not packed.
    """

    class PackedDotProductAttention(stock):
        def forward(
            self,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            attention_mask: torch.Tensor | None,
            *,
            packed_seq_params: Any = None,
            **options: Any,
        ) -> torch.Tensor:
            """Packed: [tokens, heads, dim] each, and [tokens, 1, heads x dim] is returned."""
            attend = partial(super().forward, **options)
            if packed_seq_params is None:
                return attend(query, key, value, attention_mask)
            lengths = _lengths(packed_seq_params)
            parts = (each.unsqueeze(1).split(lengths) for each in (query, key, value))
            return torch.cat([attend(q, k, v, None) for q, k, v in zip(*parts, strict=True)])

    return PackedDotProductAttention


def _lengths(packing: Any) -> list[int]:
    """Of the sequences in a micro-batch; layers share the one wait for the device."""
    known: list[int] | None = getattr(packing, "zorse_lengths", None)
    if known is None:
        known = [length for length in packing.cu_seqlens_q.diff().tolist() if length]
        packing.zorse_lengths = known
    return known


@dataclass(frozen=True, kw_only=True)
class PackedLayout:
    """How packed samples lie in layers, and how between chunks, where they can be cut apart."""

    tp_group: torch.distributed.ProcessGroup | None = None
    """Whose ranks have the same part each of a sequence, with sequence parallelism."""

    def one_sequence(self, activation: torch.Tensor) -> torch.Tensor:
        """[sequence, samples, hidden] as layers have it: [tokens, 1, hidden].

        Samples follow one another, as in `flatten_batch_for_packed_sequences`.
        """
        return self._changed(activation, _joined, activation.shape[1])

    def by_samples(self, activation: torch.Tensor, num_samples: int) -> torch.Tensor:
        """The inverse of `one_sequence`; contiguous."""
        return self._changed(activation, partial(_apart, num_samples=num_samples), num_samples)

    def _changed(
        self, own: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor], num_samples: int
    ) -> torch.Tensor:
        """Of several samples a rank has other tokens in the one layout than in the other."""
        if self.tp_group is None or num_samples == 1:
            return change(own)
        whole = own.new_empty(self.tp_group.size() * own.shape[0], *own.shape[1:])
        torch.distributed.all_gather_into_tensor(whole, own.contiguous(), group=self.tp_group)
        return change(whole).chunk(self.tp_group.size())[self.tp_group.rank()].contiguous()


def left_as_one_sequence(
    _layer: Any, hidden_states: torch.Tensor, padding_mask: Any, packed_seq_params: Any
) -> tuple[torch.Tensor, Any, None]:
    """In place of `_maybe_unflatten_for_moe`: see `PlanRouter.routing`."""
    return hidden_states, padding_mask, None


def _joined(samples: torch.Tensor) -> torch.Tensor:
    return samples.transpose(0, 1).reshape(-1, 1, samples.shape[2])


def _apart(tokens: torch.Tensor, num_samples: int) -> torch.Tensor:
    return tokens.reshape(num_samples, -1, tokens.shape[2]).transpose(0, 1).contiguous()
