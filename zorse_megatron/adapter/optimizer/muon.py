"""Muon under a plan: one owner of a matrix's elements computes its update.

All that Muon does is by element, as Adam, but for one thing: the direction of a matrix is
orthogonalized whole. Shards end anywhere, so several ranks may own parts of a matrix. They send
what is to be orthogonalized to the one that owns most of it and get their parts back; momentum,
weight decay and the update itself stay with the elements. What is no matrix, and embeddings, are
Adam's, as in stock.

Source: `OrthogonalizedOptimizer.step` of emerging_optimizers, and `TensorParallelMuon` and
`_get_megatron_emerging_optimizer` in megatron.core.optimizer, whose own object computes here.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import emerging_optimizers as stock
from megatron.core.optimizer.optimizer_config import ParamKey

from zorse_megatron.errors import FlagError
from zorse_megatron.schedule.shards import Interval

MUON = "muon"
ADAM = {"optimizer": "adam"}
"""What marks parameter groups that Muon leaves to Adam."""


def refuse_without_package() -> None:
    """Raise FlagError where stock's Muon is not installed."""
    if not stock.HAVE_EMERGING_OPTIMIZERS:
        raise FlagError.of(
            "The optimizer is not installed",
            where="--optimizer muon",
            found="no package emerging_optimizers, or one that Megatron cannot use",
            expected="emerging-optimizers 0.2 or later",
            remedy="Run: pip install emerging-optimizers",
        )


def with_adams(overrides: Mapping[ParamKey, Any]) -> dict[ParamKey, Any]:
    """Stock's overrides of parameter groups, and which parameters are Adam's."""
    entry = stock._EMERGING_OPTIMIZERS[MUON]
    return {**overrides, **dict.fromkeys(entry.default_param_overrides, ADAM)}


def mark_qkv(chunks: Sequence[torch.nn.Module]) -> None:
    """Tell Muon which matrices are queries, keys and values: each is orthogonalized on its own."""
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if parameter.requires_grad and name.endswith("linear_qkv.weight"):
                parameter.is_qkv = True  # type: ignore[attr-defined]


@dataclass(frozen=True, kw_only=True, eq=False)
class OwnedPart:
    """What this rank owns of a matrix."""

    parameter: torch.nn.Parameter
    interval: Interval
    """Elements of the flattened matrix."""
    shard: torch.Tensor
    """The tensor that is stepped, in fp32."""
    group: Mapping[str, Any]
    """Its parameter group."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SharedMatrix:
    """A matrix with elements on several ranks, of which this is one."""

    part: OwnedPart
    holders: Mapping[int, Interval]
    """Global rank -> the elements it owns."""
    process_group: dist.ProcessGroup

    @property
    def computes(self) -> int:
        """The rank that owns most; of several the first."""
        return max(self.holders, key=lambda rank: (_length(self.holders[rank]), -rank))

    def with_others(self, operation: Any, whole: torch.Tensor) -> Iterator[dist.P2POp]:
        """Receive or send what the other holders own, by the rank that computes."""
        for rank, part in self.holders.items():
            if rank != self.computes:
                yield dist.P2POp(operation, whole[slice(*part)], rank, self.process_group)

    def with_computing(self, operation: Any, part: torch.Tensor) -> dist.P2POp:
        """Send or receive the own part, by another rank."""
        return dist.P2POp(operation, part, self.computes, self.process_group)


class MuonSteps:
    """Updates the matrices of a rank's shards, one chunk after the other."""

    def __init__(self, optimizer: Any, config: Any, collection: Any) -> None:
        """`optimizer`: an `UnevenDistributedOptimizer` over Adam, of stock's parameter groups."""
        chunks = optimizer.model_chunks
        options = stock._muon_config_to_kwargs(config, chunks, collection)
        # Steps nothing: it holds the settings and knows how to orthogonalize.
        self._rule = stock.TensorParallelMuon([torch.nn.Parameter(torch.empty(0))], **options)
        self._state = optimizer.optimizer.state
        group_of = {
            id(shard): group
            for group in optimizer.optimizer.param_groups
            for shard in group["params"]
            if "optimizer" not in group
        }
        self._shards = set(group_of)
        self._whole: dict[int, list[OwnedPart]] = {id(chunk): [] for chunk in chunks}
        self._shared: dict[int, list[SharedMatrix]] = {id(chunk): [] for chunk in chunks}
        for chunk, parameter, interval, shard in optimizer.owned_shards:
            if id(shard) in group_of and _length(interval):
                self._add(chunk, parameter, shard, group_of[id(shard)])

    def _add(
        self, chunk: Any, parameter: torch.nn.Parameter, shard: torch.Tensor, group: Any
    ) -> None:
        holders = _holders(chunk, parameter)
        part = OwnedPart(
            parameter=parameter, interval=holders[dist.get_rank()], shard=shard, group=group
        )
        if len(holders) == 1:
            self._whole[id(chunk)].append(part)
            return
        self._shared[id(chunk)].append(
            SharedMatrix(part=part, holders=holders, process_group=chunk.intra_dp_cp_group)
        )

    def steps(self, shard: torch.Tensor) -> bool:
        """Whether a shard is Muon's."""
        return id(shard) in self._shards

    def allocate(self) -> None:
        """Give all parts their momentum, zero before the first step."""
        for parts in self._whole.values():
            for part in parts:
                self._momentum(part)
        for matrices in self._shared.values():
            for matrix in matrices:
                self._momentum(matrix.part)

    @torch.no_grad()
    def step_chunk(self, chunk: Any) -> None:
        """Update this rank's parts of a chunk's matrices; ranks that share matrices call alike."""
        shared = self._shared[id(chunk)]
        directions = {id(each): self._direction(each.part) for each in shared}
        wholes = self._collect(shared, directions)
        for each in shared:
            if id(each) in wholes:
                wholes[id(each)] = self._orthogonalized(each.part, wholes[id(each)])
        coming = self._give_back(shared, wholes, directions)
        for part in self._whole[id(chunk)]:
            self._apply(part, self._orthogonalized(part, self._direction(part)))
        for work in coming:
            work.wait()
        for each in shared:
            self._apply(each.part, directions[id(each)])

    def _collect(
        self, shared: Sequence[SharedMatrix], directions: Mapping[int, torch.Tensor]
    ) -> dict[int, torch.Tensor]:
        """Have the matrices that this rank computes, whole."""
        wholes: dict[int, torch.Tensor] = {}
        messages: list[dist.P2POp] = []
        for each in shared:
            mine = directions[id(each)]
            if each.computes != dist.get_rank():
                messages.append(each.with_computing(dist.isend, mine))
                continue
            whole = wholes[id(each)] = mine.new_empty(each.part.parameter.numel())
            whole[slice(*each.part.interval)] = mine
            messages += each.with_others(dist.irecv, whole)
        for work in _started(messages):
            work.wait()
        return wholes

    def _give_back(
        self,
        shared: Sequence[SharedMatrix],
        wholes: Mapping[int, torch.Tensor],
        directions: dict[int, torch.Tensor],
    ) -> list[Any]:
        """Start to turn the directions into what the ranks that compute have made of them."""
        messages: list[dist.P2POp] = []
        for each in shared:
            whole = wholes.get(id(each))
            if whole is None:
                messages.append(each.with_computing(dist.irecv, directions[id(each)]))
                continue
            directions[id(each)] = whole[slice(*each.part.interval)]
            messages += each.with_others(dist.isend, whole)
        return _started(messages)

    # What is stock's: weight decay, momentum, orthogonalization, update.

    def _momentum(self, part: OwnedPart) -> torch.Tensor:
        state = self._state[part.shard]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(part.shard.detach())
        momentum: torch.Tensor = state["momentum_buffer"]
        return momentum

    def _direction(self, part: OwnedPart) -> torch.Tensor:
        """What is to be orthogonalized of a part; its own memory."""
        shard, group, beta = part.shard, part.group, self._rule.defaults["momentum"]
        gradient = shard.grad
        assert gradient is not None, "a step follows the reduction, which gives every shard its sum"
        self._rule._apply_weight_decay_inplace(shard, gradient, group["lr"], group["weight_decay"])
        momentum = self._momentum(part)
        momentum.lerp_(gradient, 1 - beta)
        return gradient.lerp(momentum, beta) if self._rule.nesterov else momentum.clone()

    def _orthogonalized(self, part: OwnedPart, direction: torch.Tensor) -> torch.Tensor:
        """Of a whole matrix, flat."""
        from emerging_optimizers.utils import (
            fp32_matmul_precision,  # installed where Muon is asked for
        )

        matrix = direction.view(part.parameter.shape)
        with fp32_matmul_precision(self._rule.fp32_matmul_prec):
            found: torch.Tensor = self._rule.orthogonalize(part.parameter, matrix)
        return found.reshape(-1)

    def _apply(self, part: OwnedPart, update: torch.Tensor) -> None:
        part.shard.add_(update, alpha=-part.group["lr"])


def _holders(chunk: Any, parameter: torch.nn.Parameter) -> dict[int, Interval]:
    """Global rank -> the elements it owns."""
    if parameter in chunk.mixed_tp:  # ranks share experts
        found: dict[int, Interval] = chunk.shards.owners(parameter)
        return found
    ranks = dist.get_process_group_ranks(chunk.intra_dp_cp_group)
    parts = zip(ranks, chunk.owned_parts(parameter), strict=True)
    return {rank: owned for rank, owned in parts if _length(owned)}


def _length(interval: Interval) -> int:
    return interval[1] - interval[0]


def _started(messages: Sequence[dist.P2POp]) -> list[Any]:
    return dist.batch_isend_irecv(list(messages)) if messages else []
