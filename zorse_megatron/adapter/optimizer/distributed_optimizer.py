"""Megatron's distributed optimizer for shards of unequal size.

Source: `megatron.core.optimizer.distrib_optimizer.DistributedOptimizer`. Which elements a rank owns
is the only difference to stock's step; checkpoints are in `adapter.checkpoint.saved_optimizer`.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from megatron.core import optimizer as stock
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer, Range

from zorse_megatron.adapter.checkpoint import saved_optimizer
from zorse_megatron.adapter.checkpoint.saved_optimizer import CheckpointLayout, init_momentum
from zorse_megatron.adapter.compute_dtype import take_exact
from zorse_megatron.adapter.optimizer.chunk_steps import ChunkSteps, by_chunk
from zorse_megatron.adapter.optimizer.gradient_factors import (
    GradientFactors,
    refuse_separate_norms,
)
from zorse_megatron.adapter.optimizer.host_state import HostState
from zorse_megatron.adapter.optimizer.muon import (
    MUON,
    MuonSteps,
    mark_qkv,
    refuse_without_package,
    with_adams,
)
from zorse_megatron.adapter.optimizer.streamed_gradients import StreamedGradients
from zorse_megatron.adapter.patches.rebind import REGISTRY
from zorse_megatron.runtime.host_link import HostBacked, HostLink
from zorse_megatron.schedule.shards import Interval


class UnevenDistributedOptimizer(DistributedOptimizer):
    """`DistributedOptimizer` over buckets cut by `UnevenDistributedDataParallel`.

    Works for fp32, bf16 and fp16 with torch's SGD, Adam and AdamW and with fused ones. A rank that
    owns nothing has empty parameter groups, and takes part in all collectives.

    `step_count` is the number of updates so far, the same on all ranks; a rank that owns nothing
    has no other record of it.
    """

    config: Any

    def __init__(
        self,
        inner: Any,
        config: Any,
        grad_scaler: Any,
        init_state_fn: Callable[..., None] | None,
        *,
        checkpoint_layout: CheckpointLayout,
        state_waits: bool = False,
        **kwargs: Any,
    ) -> None:
        """Takes stock's arguments and the layout in which `sharded_state_dict` writes.

        `state_waits`: main parameters are made on the CPU, for `keep_in_host` follows.
        """
        self._state_waits = state_waits
        init_state_fn = init_state_fn or init_momentum  # stock has none for SGD, and needs one
        super().__init__(inner, config, grad_scaler, init_state_fn, **kwargs)
        self.checkpoint_layout = checkpoint_layout
        self.saves_experts_apart = False
        """Whether a checkpoint is to be read by stock with expert parallelism."""
        self.host_state: HostState | None = None
        self.copies_in_step = False
        """Whether the inner step writes 16-bit parameters, too."""
        self.factors = GradientFactors(self, torch.empty(0, device="cuda").device)
        """Of the step that is being made."""
        self.muon: MuonSteps | None = None
        """What steps matrices, if not the inner optimizer."""
        self.finds_main = True
        """Whether a checkpoint that is loaded has main parameters; else its weights are these."""
        self._may_step = False
        self.step_count = 0
        self._last_grad_norm = 0.0

    @property
    def is_mixed(self) -> bool:
        """Whether groups compute in different types."""
        return any(chunk.is_mixed for chunk in self.model_chunks)

    @classmethod
    def _build_model_gbuf_range(cls, param_and_grad_buffer: Any, bucket_index: int) -> dict:
        """The parameters' parts in this rank's shard of a bucket (stock: equal shards)."""
        bucket = param_and_grad_buffer.buckets[bucket_index]
        packed = getattr(param_and_grad_buffer, "zorse_packed", None)
        if packed is not None:  # places in what the rank owns, see `mixed_tp_shards`
            names = ("gbuf_world", "gbuf_world_in_bucket", "gbuf_local", "param")
            owned = {p: packed[p] for p in bucket.params_list if packed[p]}
            return {"param_map": {p: dict.fromkeys(names, Range(0, n)) for p, n in owned.items()}}
        start, stop = bucket.shard_bounds[param_and_grad_buffer.data_parallel_group.rank()]
        shard = Range(bucket.offset + start, bucket.offset + stop)
        param_map = cls._build_model_gbuf_param_range_map(
            param_and_grad_buffer.param_index_map, shard, bucket.offset
        )
        return {"param_map": param_map}

    def _build_model_and_main_param_groups(
        self, gbuf_ranges: list, param_gbuf_map: dict, opt_group_ranges: list, config: Any
    ) -> tuple:
        """Stock's, for one chunk after the other (see `chunk_steps`)."""
        stock = super()._build_model_and_main_param_groups
        return by_chunk(
            lambda groups: stock(gbuf_ranges, param_gbuf_map, groups, config),
            opt_group_ranges,
            self.model_chunks,
            mains_in_host=self._state_waits,
        )

    def get_grad_norm(self) -> float:
        """The norm over all ranks' shards, which they have told each other before the step."""
        self._last_grad_norm = self.factors.norm
        return self._last_grad_norm

    @torch.no_grad()
    def step_with_ready_grads(self) -> bool:
        """Decide for all chunks: `step_chunk` then updates this rank's shard of each."""
        # ChainedOptimizer.step makes this comparison only on ranks that own parameters.
        threshold = self.config.grad_norm_skip_threshold
        if math.isfinite(threshold) and self._last_grad_norm > threshold:
            return False
        if not self.is_stub_optimizer:
            self._may_step = True
            (self.host_state or self.chunk_steps).begin()
        self.step_count += 1
        return True

    @cached_property
    def chunk_steps(self) -> ChunkSteps:
        """The inner optimizer, chunk by chunk."""
        return ChunkSteps(self)

    @torch.no_grad()
    def step_chunk(self, chunk: Any) -> None:
        """Update this rank's shard of a chunk, if the step before it was successful.

        Each of `model_chunks` once, in this order. Without gathering.
        """
        if not self._may_step:
            return
        self._may_step = chunk is not self.model_chunks[-1]
        timers = self.config.timers
        if timers is not None:  # without barriers, as ranks have different numbers of chunks
            timers("optimizer-inner-step", log_level=1).start()
        if self.host_state is not None:
            self.host_state.step_chunk(chunk)
        else:
            with self.chunk_steps.counting_one(), self.chunk_steps.only(chunk):
                self.optimizer.step()
            if self.muon is not None:
                self.muon.step_chunk(chunk)
            if not self.copies_in_step:
                self.copy_main_to_model(chunk)
            elif chunk.shards is not None:
                chunk.shards.mark_changed()
        if timers is not None:
            timers("optimizer-inner-step").stop()

    # Shards, wherever a chunk keeps them.

    def keep_in_host(
        self,
        link: HostLink,
        *,
        optimizer_state: bool,
        state_fraction: float | None = None,
        gradients: bool,
        on_change: Callable[[], None],
    ) -> None:
        """Step in the way of `host_state` from now on; before there is any other state."""
        assert self.muon is None, "refused before the job starts: `flags.conditions.state_waits`"
        streamed = None
        if gradients:
            clip_grad = self.config.clip_grad
            streamed = StreamedGradients(
                self, link.device, clip_grad=clip_grad, on_change=on_change
            )
            self.factors = streamed
            self.config = replace(self.config, clip_grad=0.0)
        self.host_state = HostState(
            self,
            link,
            optimizer_state=optimizer_state,
            fraction=state_fraction,
            gradients=streamed,
            on_change=on_change,
        )

    def update_in_one_pass(self, step: Callable[[], None]) -> None:
        """Step by `step`, which also writes the new parameters of 16 bits (see `shard_update`).

        It multiplies gradients by what `factors` says, and clips them.
        """
        self.optimizer.step = step
        self.copies_in_step = True
        self.config = replace(self.config, clip_grad=0.0)

    def _unscale_main_grads_and_check_for_nan(self) -> bool:
        return self.factors.has_overflow

    def _copy_model_grads_to_main_grads(self) -> None:
        if isinstance(self.factors, StreamedGradients):
            return
        pieces, self.factors.pieces = self.factors.pieces, []
        for (_, piece), (*_, shard) in zip(pieces, self.owned_shards, strict=True):
            shard.grad = piece.float()
        if not self.copies_in_step:
            self.factors.multiply(shard.grad for *_, shard in self.owned_shards)

    def _copy_model_params_to_main_params(self, state_dict: Any = None) -> None:
        # What is in `state_dict` has been loaded into the model; values that its type cannot hold
        # are kept beside it.
        for chunk, parameter, (start, stop), shard in self.owned_shards:
            if parameter.dtype != torch.float32:
                self.write(shard, chunk.read_parameter(parameter, start, stop))
        take_exact(self)

    @torch.no_grad()
    def copy_main_to_model(self, chunk: Any) -> None:
        """Write a chunk's stepped main parameters to where its parameters are kept.

        fp32 ones are stepped there; stock copies them onto themselves.
        """
        for owner, parameter, (start, stop), shard in self.owned_shards:
            if owner is chunk:
                kept = chunk.parameter_piece(parameter, start, stop)
                if kept.data_ptr() != shard.data_ptr():
                    kept.copy_(shard)
        if chunk.shards is not None:
            chunk.shards.mark_changed()

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """A stepped tensor or one of its state; as a CPU tensor if it waits in the host."""
        memory = self.memory_of(tensor)
        return tensor.detach() if memory is None else memory.read(tensor.detach())

    @torch.no_grad()
    def write(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """Set a stepped tensor or one of its state, wherever it is now."""
        memory = self.memory_of(tensor)
        if memory is None:
            tensor.detach().copy_(value.view_as(tensor))
        else:
            memory.write(tensor.detach(), value)

    def memory_of(self, tensor: torch.Tensor) -> HostBacked | None:
        """What may wait in the host and has the tensor's storage."""
        storage = tensor.untyped_storage()._cdata
        sharded = [chunk.shards for chunk in self.model_chunks if chunk.shards is not None]
        shards = [buffer.memory for each in sharded for buffer in each.parameters]
        state = self.host_state.memories if self.host_state is not None else []
        return next((m for m in (*shards, *state) if m and m.storage._cdata == storage), None)

    @cached_property
    def owned_shards(self) -> tuple[tuple[Any, torch.nn.Parameter, Interval, torch.Tensor], ...]:
        """Chunk, model parameter, owned elements of it, and the tensor that is stepped.

        Every step asks, and what a rank owns stays the same.
        """
        return tuple(self._find_owned_shards())

    def _find_owned_shards(
        self,
    ) -> Iterator[tuple[Any, torch.nn.Parameter, Interval, torch.Tensor]]:
        if self.is_stub_optimizer:
            return
        chunk_of = {p: chunk for chunk in self.model_chunks for p in chunk.params_with_grad}
        for model_groups, shard_groups in (
            (self.model_float16_groups, self.shard_fp32_from_float16_groups),
            (self.model_fp32_groups, self.shard_fp32_groups),
        ):
            for model_group, shard_group in zip(model_groups, shard_groups, strict=True):
                for parameter, shard in zip(model_group, shard_group, strict=True):
                    owned = self._get_model_param_range_map(parameter)["param"]
                    yield chunk_of[parameter], parameter, (owned.start, owned.end), shard

    # Checkpoints.

    def sharded_state_dict(
        self,
        model_sharded_state_dict: Any,
        is_loading: bool = False,
        sharding_type: str | None = None,
        metadata: dict | None = None,
    ) -> dict:
        """The state in the space of the model's parameters; see
        `adapter.checkpoint.saved_optimizer`.
        """
        return saved_optimizer.sharded_state_dict(
            self, model_sharded_state_dict, is_loading=is_loading, metadata=metadata or {}
        )

    def load_state_dict(self, state_dict: dict) -> None:
        """Take over what `dist_checkpointing.load` made of the request to load."""
        saved_optimizer.load_state_dict(self, state_dict)
        if self.is_mixed and not self.finds_main:
            self._copy_model_params_to_main_params()
        for chunk in self.model_chunks:
            if chunk.shards is not None:
                chunk.shards.mark_changed()


# Build stock's optimizer for a model chunk, with shards of unequal size.


def build_uneven_optimizer(
    config: Any,
    model_chunks: Sequence[Any],
    config_overrides: Any = None,
    *,
    pg_collection: Any,
    checkpoint_layout: CheckpointLayout,
    state_waits: bool = False,
    dump_param_to_param_group_map: str | None = None,
) -> Any:
    """Return what `megatron.core.optimizer.get_megatron_optimizer` returns for these arguments.

    A collective call of all ranks. `model_chunks` are `UnevenDistributedDataParallel`;
    `pg_collection` has the groups of a plan (intra_dist_opt is the world). `config` is
    not changed; the optimizer gets a copy with use_distributed_optimizer. `state_waits`: its state
    is to wait in the host (`UnevenDistributedOptimizer.keep_in_host`).
    """
    uneven_class = partial(
        UnevenDistributedOptimizer, checkpoint_layout=checkpoint_layout, state_waits=state_waits
    )
    wanted = config
    if config.optimizer == MUON:
        refuse_without_package()
        if config_overrides is None:
            config_overrides = stock.get_standard_config_overrides(config)
        config, config_overrides = replace(config, optimizer="adam"), with_adams(config_overrides)
        mark_qkv(model_chunks)
    with REGISTRY.applied({"optimizer_class": lambda _stock: uneven_class}):
        optimizer = stock.get_megatron_optimizer(
            replace(config, use_distributed_optimizer=True),
            list(model_chunks),
            config_overrides,
            use_gloo_process_groups=False,
            pg_collection=pg_collection,
            dump_param_to_param_group_map=dump_param_to_param_group_map,
        )
    parts = optimizer.chained_optimizers
    assert len(parts) == 1, f"{len(parts)} optimizers, whose norms would be summed apart"
    refuse_separate_norms(parts[0])
    if wanted.optimizer == MUON and not parts[0].is_stub_optimizer:
        parts[0].muon = MuonSteps(parts[0], wanted, pg_collection)
    return optimizer
