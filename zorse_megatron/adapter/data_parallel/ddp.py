"""Megatron's DDP wrapper for a group whose ranks own shards of unequal size.

Resident chunks have their unsharded parameters and gradients on every rank. Gradients are summed
(never averaged) into the owners' shards; the optimizer then steps the shards and the owners' new
parameters are gathered. See `buckets` for the communication, `distributed_optimizer` for the step.
Of a sharded chunk a rank has unsharded parameters and gradients only while the action list says so;
see `chunk_shards`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
from megatron.core.rerun_state_machine import RerunMode, get_rerun_state_machine
from megatron.core.utils import unwrap_model

from zorse_megatron.adapter.checkpoint.saved_parameters import joined_loaded, take_loaded
from zorse_megatron.adapter.compute_dtype import keep_exact
from zorse_megatron.adapter.data_parallel.buckets import (
    BucketOrder,
    bucket_per_layer,
    cut_buckets,
    uneven_bucket_groups,
)
from zorse_megatron.adapter.data_parallel.chunk_shards import ChunkShards, ParameterGathers
from zorse_megatron.adapter.data_parallel.mixed_tp_shards import MixedTpShards, mixed_tp_tensor
from zorse_megatron.adapter.parameter_parts import cut_axis, held_parts
from zorse_megatron.inputs.lora import is_adapter
from zorse_megatron.plan.plan import Group
from zorse_megatron.runtime.hierarchical_collectives import CommDtype, RegionGroups
from zorse_megatron.runtime.host_link import HostLink
from zorse_megatron.runtime.mailbox import ExpertRank, TpRank
from zorse_megatron.runtime.mixed_tp_exchange import MixedTpTensor
from zorse_megatron.schedule.shards import Interval, intersection
from zorse_megatron.schedule.tensor_parallel_parts import Run, runs_of_rows


class UnevenDistributedDataParallel(DistributedDataParallel):
    """`DistributedDataParallel` with more arguments, by name.

    `shard_weights`: one float >= 0 per rank of the data-parallel group, in the order of the group;
    each bucket is cut in this proportion, and a rank with weight 0 owns nothing. A rank may run
    any number of micro-batches in a step, none included, as long as it then calls
    `finish_grad_sync`. Parameters are gathered by `gathers`, when the list says so.

    `sharded`: have unsharded parameters and gradients only between `shards.gather` and
    `shards.release`, and between the first backward of a step and the reduction. Such a chunk is
    cut into a bucket per layer and communicates when it is told to: overlap_grad_reduce has no
    effect on it. `link`: for shards of parameters that may wait in the host. `comm_dtype`: how
    gradients, which are then fp32, are sent; None: as they are kept. `is_mixed`: groups compute in
    different types (see `compute_dtype`). `place`: this rank's in its tensor-parallel group, or
    among ranks that share experts. `mixed_group`: the plan's group, if its replicas cut layers
    differently or share experts: what a rank owns is packed then (see `mixed_tp_shards`), and
    `sharded` says whether it is all it keeps. `delays_weights`: weight gradients come after their
    backward (see `adapter.model.weight_gradients`). `reduces_in_list`: no reduction starts within a
    backward, before its place in the list: overlap_grad_reduce has no effect. `regions`: of a
    hierarchical group. Options that unequal shards cannot keep have been refused as flags
    (`zorse_megatron.flags`).
    """

    bucket_groups: list[Any]
    shards: Any
    """`ChunkShards`; None where parameters stay unsharded."""

    def __init__(  # noqa: PLR0917  (stock's signature)
        self,
        config: Any,
        ddp_config: Any,
        module: torch.nn.Module,
        disable_bucketing: bool = False,
        pg_collection: Any = None,
        full_param_layout: Any = None,
        *,
        shard_weights: Sequence[float],
        sharded: bool = False,
        link: HostLink | None = None,
        comm_dtype: CommDtype | None = None,
        is_mixed: bool = False,
        place: TpRank | ExpertRank | None = None,
        mixed_group: Group | None = None,
        delays_weights: bool = False,
        reduces_in_list: bool = False,
        regions: RegionGroups | None = None,
    ) -> None:
        self.has_uneven_tp_shards = (
            not place.tp_shards.are_equal if isinstance(place, TpRank) else place is not None
        )
        by_layer = sharded or mixed_group is not None or self.has_uneven_tp_shards
        if by_layer or delays_weights or reduces_in_list:
            # Stock refuses a config with both numbers for buckets; it has made one of the other.
            ddp_config = replace(ddp_config, overlap_grad_reduce=False, num_buckets=None)
        if by_layer:
            disable_bucketing = False
            full_param_layout = bucket_per_layer(module, ddp_config, pg_collection)
        self.tp_group = place.group if isinstance(place, TpRank) else None
        self.delays_weights = delays_weights
        super().__init__(
            config=config,
            ddp_config=ddp_config,
            module=module,
            disable_bucketing=disable_bucketing,
            pg_collection=pg_collection,
            full_param_layout=full_param_layout,
        )
        self.shard_weights = tuple(shard_weights)
        self.comm_dtype = comm_dtype
        self.regions = regions
        self.is_mixed = is_mixed
        self.parts = held_parts(module, config, place)
        """What this rank holds of each parameter of the model."""
        self.frozen = tuple(p for p in module.parameters() if not p.requires_grad)
        """Parameters that are never sharded, and never leave the device."""
        self.loads_parts = any(is_adapter(name) for name, _ in module.named_parameters())
        """Whether adapters and what they are beside come from different checkpoints."""
        self._make_bucket_groups()
        self.gathers = ParameterGathers(module, self.bucket_groups)
        self.shards = ChunkShards(self, link) if sharded and mixed_group is None else None
        self.mixed_tp: dict[torch.nn.Parameter, MixedTpTensor] = {}
        """Parameters of which what a rank owns is packed."""
        if mixed_group is not None:
            self._pack(mixed_group, reshards=sharded)

    def _pack(self, mixed_group: Group, *, reshards: bool) -> None:
        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad:
                self.mixed_tp[parameter] = mixed_tp_tensor(
                    mixed_group,
                    name,
                    self.parts[parameter],
                    cut_axis(parameter),
                    is_gated=bool(self.config.gated_linear_unit),
                )
        self.shards = MixedTpShards(self, self.mixed_tp, reshards=reshards)
        for buffer in self.buffers:
            buffer.zorse_packed = {p: self.shards.num_owned(p) for p in buffer.params}

    def _make_bucket_groups(self) -> None:
        """Cut stock's buckets and exchange its bucket groups for ours."""
        cut_buckets(self.buffers, self.shard_weights, self.intra_dp_cp_group)
        groups = uneven_bucket_groups(self)
        self.bucket_groups = groups
        self.bucket_order = BucketOrder(groups)
        self.param_to_bucket_group = {
            param: group for group in groups for bucket in group.buckets for param in bucket.params
        }

    def begin_grad_sync(self) -> None:
        """Start the reduction of gradients, unless a backward has; `finish_grad_sync` waits."""
        if self.shards is not None:
            self.shards.start_reduction()
            return
        for group in self.bucket_groups:
            group.begin_grad_sync()

    @property
    def reduces_beside(self) -> bool:
        """Whether a reduction holds memory of its own until it has been waited for."""
        return not (self.shards is self.comm_dtype is self.regions is None)

    @property
    def parameter_bytes(self) -> int:
        """Parameters as they are computed with, on the device now: unsharded, or shards."""
        frozen_bytes = sum(parameter.nbytes for parameter in self.frozen)
        if self.shards is not None:
            return frozen_bytes + int(self.shards.parameter_bytes)
        buffers = (buffer.param_data.untyped_storage() for buffer in self.buffers)
        return frozen_bytes + sum(storage.nbytes() for storage in buffers)

    @property
    def gradient_bytes(self) -> int:
        """Gradients as they are accumulated, on the device now: unsharded, or shards."""
        if self.shards is not None:
            return self.shards.gradient_bytes
        return sum(buffer.grad_data.untyped_storage().nbytes() for buffer in self.buffers)

    @property
    def reduction_bytes(self) -> int:
        """What a reduction under way holds beside the gradients."""
        if self.shards is not None:
            return self.shards.reduction_bytes
        return sum(group.reduction_bytes for group in self.bucket_groups)

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Wait for the reduction of gradients, after starting it if nobody has."""
        if self.shards is None:
            super().finish_grad_sync(force_all_reduce=force_all_reduce)
            return
        self.shards.finish_reduction()

    def zero_grad_buffer(self) -> None:
        """Prepare the gradients for a new step."""
        if self.shards is None:
            super().zero_grad_buffer()
            return
        for parameter in self.params_with_grad:
            parameter.grad_added_to_main_grad = False
        self.shards.zero_gradients()
        for group in self.bucket_groups:
            group.reset()

    def parameter_piece(self, parameter: torch.nn.Parameter, start: int, stop: int) -> torch.Tensor:
        """Elements [start, stop) of a flattened parameter, of those that this rank owns."""
        if self.shards is not None:
            return self.shards.parameter_piece(parameter, start, stop)
        return parameter.detach().view(-1)[start:stop]

    def read_parameter(self, parameter: torch.nn.Parameter, start: int, stop: int) -> torch.Tensor:
        """Elements as in `parameter_piece`; as a CPU tensor if they wait in the host."""
        if self.shards is not None:
            return self.shards.read(parameter, start, stop)
        return self.parameter_piece(parameter, start, stop)

    @torch.no_grad()
    def write_parameter(
        self, parameter: torch.nn.Parameter, start: int, stop: int, values: torch.Tensor
    ) -> None:
        """Set elements as in `parameter_piece`, wherever they are now."""
        if self.shards is not None:
            self.shards.write(parameter, start, stop, values)
        else:
            self.parameter_piece(parameter, start, stop).copy_(values)

    def owned_part(self, parameter: torch.nn.Parameter) -> Interval:
        """Which elements of a flattened trainable parameter this rank owns; (0, 0): none.

        Of a packed one, places in what is packed.
        """
        if parameter in self.mixed_tp:
            return 0, self.shards.num_owned(parameter)
        return self.owned_parts(parameter)[self.intra_dp_cp_group.rank()]

    def owned_parts(self, parameter: torch.nn.Parameter) -> list[Interval]:
        """The same of each rank of the data-parallel group; of a parameter that is not packed."""
        for buffer in self.buffers:
            bucket = buffer.param_to_bucket.get(parameter)
            if bucket is not None:
                start, stop = bucket.param_to_index[parameter]
                owned = (intersection(each, (start, stop)) for each in bucket.shard_bounds)
                return [(part[0] - start, part[1] - start) if part else (0, 0) for part in owned]
        raise KeyError("the parameter is not a trainable one of this chunk")

    def owned_runs(self, parameter: torch.nn.Parameter) -> tuple[Run, ...]:
        """What this rank owns of a parameter that TP groups cut by rows, as places in the whole."""
        if parameter in self.mixed_tp:
            return self.shards.owned_runs(parameter)
        return tuple(runs_of_rows(self.parts[parameter], self.owned_part(parameter)))

    @torch.no_grad()
    def set_parameter(self, parameter: torch.nn.Parameter, value: torch.Tensor) -> None:
        """Take over a value: all of it, or of a sharded chunk what this rank owns.

        Frozen parameters are never sharded.
        """
        if self.shards is None or not parameter.requires_grad:
            parameter.copy_(value)
            return
        start, stop = self.owned_part(parameter)
        self.shards.write(parameter, start, stop, self.owned_of(parameter, value))

    def owned_of(self, parameter: torch.nn.Parameter, value: torch.Tensor) -> torch.Tensor:
        """What this rank owns, flat, of a value of what it holds as `parameter`."""
        if parameter in self.mixed_tp:
            return self.shards.packed(parameter, value)
        start, stop = self.owned_part(parameter)
        return value.reshape(-1)[start:stop]

    def load_state_dict(self, state_dict: Any, strict: bool = True) -> None:
        """Take over what was loaded: unsharded parameters, or what a sharded chunk owns."""
        if self.shards is not None:
            others = take_loaded(
                self, state_dict, strict=strict and not self.loads_parts, is_mixed=self.is_mixed
            )
            super().load_state_dict(joined_loaded(self, others), strict=False)
            return
        state_dict = joined_loaded(self, state_dict)
        for name, parameter in unwrap_model(self).named_parameters() if self.is_mixed else ():
            if isinstance(state_dict.get(name), torch.Tensor):
                keep_exact(self, parameter, state_dict[name])
        super().load_state_dict(state_dict, strict=strict and not self.loads_parts)

    def gradient_piece(self, parameter: torch.nn.Parameter, start: int, stop: int) -> torch.Tensor:
        """Elements [start, stop) of a flattened gradient, of those that this rank owns."""
        if self.shards is not None:
            return self.shards.gradient_piece(parameter, start, stop)
        return parameter.main_grad.view(-1)[start:stop]  # type: ignore[attr-defined]


# Stock's check for inf and nan in gradients, without a wait of its own.
#
# Stock asks for the norm of every bucket before it reduces it, and each time the host waits for the
# device. Here the norms are noted where stock asks for them. Whether all are finite goes out with
# what all ranks sum (`RerunVotes`), or shows in the gradients' norm; only if they are not, the host
# waits for each of them. What is wrong is then told by stock's own check, in its words; with
# --rerun-mode validate_results, its default, that check gets all of them, to run the step again.
# Only with --check-for-large-grads gradients are checked where stock does it.
#
# Source: `megatron.core.distributed.param_and_grad_buffer._ParamAndGradBucketGroup.check_grads`.


class NotedNorms:
    """The norms that bucket groups have noted in one step; they forget them."""

    def __init__(self, groups: Iterable[Any]) -> None:
        self._of_groups: list[list[torch.Tensor]] = []
        for group in groups:
            self._of_groups.append(group.noted_norms)
            group.noted_norms = []
        self._norms = [norm for each in self._of_groups for norm in each]

    @property
    def are_any(self) -> bool:
        """Whether there is something to look at."""
        return bool(self._norms)

    def bad(self) -> torch.Tensor:
        """1 if one of them is inf or nan, else 0 (int32, without dimensions, on the device)."""
        norms = torch.stack([norm.float() for norm in self._norms])
        return norms.isfinite().all().logical_not().int()

    def look(self) -> None:
        """Check all of them; the host waits once.

        Raises RuntimeError with stock's message for the first bucket with inf or nan, or lets stock
        run the step again where it does that.
        """
        if not self._norms:
            return
        in_host = torch.stack([norm.float() for norm in self._norms]).cpu()
        is_finite = bool(in_host.isfinite().all())
        if is_finite and get_rerun_state_machine().mode == RerunMode.DISABLED:
            return
        # Those of the device appear in the message.
        known = iter(in_host if is_finite else self._norms)
        for each in self._of_groups:
            buckets = [SimpleNamespace(grad_data=_Noted(next(known))) for _ in each]
            _ParamAndGradBucketGroup.check_grads(SimpleNamespace(buckets=buckets), True, False)


@dataclass(frozen=True)
class _Noted:
    """Gradients of which only the norm is known."""

    value: torch.Tensor

    def norm(self, p: int) -> torch.Tensor:
        return self.value
