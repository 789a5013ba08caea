"""What a run holds on its device and in host memory, asked of Megatron's objects."""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_layer import BaseTransformerLayer
from megatron.core.utils import unwrap_model
from megatron.training import get_args
from torch.autograd.graph import saved_tensors_hooks

from zorse_megatron.adapter.compute_dtype import boundary_dtype
from zorse_megatron.adapter.rank_plan import RankPlan
from zorse_megatron.costs.interface import RecomputeMode
from zorse_megatron.costs.model_memory import LayerActivations
from zorse_megatron.flags.model_in_flags import auxiliary_losses, router_bytes
from zorse_megatron.gpus.gpu import FLASH_FROM, Attention
from zorse_megatron.inputs.lora import Lora
from zorse_megatron.inputs.model import (
    Computing,
    Experts,
    ExpertsOfRank,
    LatentAttention,
    ModelShape,
)
from zorse_megatron.runtime.executor import Executor
from zorse_megatron.runtime.host_budget import (
    HostMemoryNeed,
    available_host_bytes,
    node_name,
)
from zorse_megatron.runtime.host_link import HostLink, HostMemoryFull, host_bytes_of
from zorse_megatron.runtime.memory_ledger import MemoryLedger, out_of_host_memory
from zorse_megatron.runtime.offload import ActivationOffload
from zorse_megatron.runtime.sharded_buffer import ShardedBuffer
from zorse_megatron.schedule.transfer_windows import most_away, offloaded_gradients


def copied_gradient_bytes(optimizer: Any) -> int:
    """Copies in fp32, for a step, of gradients that are accumulated in 16 bits."""
    return sum(
        shard.grad.nbytes
        for chunk, _, _, shard in optimizer.owned_shards
        if shard.grad is not None and any(b.grad_dtype != torch.float32 for b in chunk.buffers)
    )


def state_bytes(optimizer: Any) -> int:
    """Main parameters, where they are others than the parameters, and moments.

    Of state that waits in the host what is on the device.
    """
    storages: dict[int, int] = {}
    for _, parameter, _, shard in optimizer.owned_shards:
        state = optimizer.optimizer.state[shard]
        held = [v for v in state.values() if isinstance(v, torch.Tensor) and v.ndim]
        if parameter.dtype != torch.float32:
            held.append(shard)
        for tensor in held:
            storage = tensor.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    passing = 0 if optimizer.host_state is None else optimizer.host_state.passing_bytes
    return sum(storages.values()) + passing


class SavedActivations:
    """Counts what forwards keep for their backwards, by storage, also while an action runs.

    A saved tensor counts from when autograd saves it until it drops it: what a backward computes
    again counts while it is there, layer by layer.
    """

    def __init__(
        self, is_parameter: Callable[[int], bool], offload: ActivationOffload | None
    ) -> None:
        self.is_parameter = is_parameter
        self.offload = offload
        self._holders: Counter[int] = Counter()
        """Storage (by identity) -> saved tensors that hold it."""
        self._watched: dict[int, weakref.ref[torch.Tensor]] = {}
        self._sizes: dict[int, int] = {}
        self._held_bytes = 0
        self._highest_bytes = 0

    @property
    def num_bytes(self) -> int:
        """On the device now."""
        return self._held_bytes - self._away_bytes()

    def highest_bytes(self) -> int:
        """On the device at most since the last call."""
        now = self.num_bytes
        highest, self._highest_bytes = max(now, self._highest_bytes), now
        return highest

    @contextmanager
    def counting(self, key: tuple[int, int] | None = None) -> Iterator[None]:
        """Count what computations within the block save; `key`: for it to wait in the host."""
        away_bytes = self._away_bytes()

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            saved = tensor.detach()
            if not self.is_parameter(tensor.untyped_storage().data_ptr()):
                self.hold(saved, away_bytes=away_bytes)
            return saved

        if key is not None and self.offload is not None:
            with self.offload.keeping(key, keep):
                yield
        else:
            with saved_tensors_hooks(keep, lambda tensor: tensor):
                yield

    def hold(self, tensor: torch.Tensor, *, away_bytes: int | None = None) -> None:
        """Count a tensor's storage for as long as the tensor lives."""
        storage = tensor.untyped_storage()
        identity = storage._cdata
        if not self._holders[identity]:
            self._sizes[identity] = storage.nbytes()
            self._held_bytes += storage.nbytes()
        self._holders[identity] += 1
        watch = id(tensor)
        self._watched[watch] = weakref.ref(tensor, lambda _: self._drop(watch, identity))
        away_bytes = self._away_bytes() if away_bytes is None else away_bytes
        self._highest_bytes = max(self._highest_bytes, self._held_bytes - away_bytes)

    def _drop(self, watch: int, identity: int) -> None:
        del self._watched[watch]
        self._holders[identity] -= 1
        if not self._holders[identity]:
            del self._holders[identity]
            self._held_bytes -= self._sizes.pop(identity)

    def _away_bytes(self) -> int:
        away = self.offload.away if self.offload is not None else {}
        return sum(m.num_bytes for memories in away.values() for m in memories if m.is_away)


def make_ledger(
    at: RankPlan,
    executor: Executor,
    models: Sequence[Any],
    optimizer: Any,
    *,
    activation_bytes: Callable[[], int],
    link: HostLink | None,
    watches: bool,
    limit_bytes: int | None,
) -> MemoryLedger:
    """The ledger of a rank; `watches`: whether to sample after every action."""
    on_gpu = at.device.type == "cuda"

    def of_models(name: str) -> int:
        return sum(getattr(model, name) for model in models)

    return MemoryLedger(
        {
            "parameters": lambda: of_models("parameter_bytes"),
            "gradients": lambda: of_models("gradient_bytes") + copied_gradient_bytes(optimizer),
            "optimizer state": lambda: state_bytes(optimizer),
            "activations": activation_bytes,
            "buffers": lambda: executor.message_bytes + of_models("reduction_bytes"),
        },
        rank=at.rank,
        samples=watches,
        limit_bytes=limit_bytes,
        allocated=partial(torch.cuda.max_memory_allocated, at.device) if on_gpu else None,
        in_host=lambda: dict(link.held) if link is not None else {},
    )


def watch_logits(models: list[Any], saved: SavedActivations) -> None:
    """Count logits while the loss is made of them: nothing saves them for a backward."""
    for model in models:
        head = getattr(unwrap_model(model), "output_layer", None)
        if head is not None:
            head.register_forward_hook(lambda _head, _inputs, outputs: saved.hold(outputs[0]))


@contextmanager
def before_first_step(rank: int, link: HostLink | None) -> Iterator[None]:
    """Say of what is sent to the host within the block where there is no room for it."""
    try:
        yield
    except HostMemoryFull as full:
        waiting = link.held if link is not None else {}
        raise out_of_host_memory(full, rank=rank, waiting=waiting) from full


def is_parameter(models: list[Any], address: int) -> bool:
    """Whether the storage at `address` is that of parameters of wrapped models."""
    return any(
        held.untyped_storage().data_ptr() == address
        for model in models
        for held in (*(buffer.param_data for buffer in model.buffers), *model.frozen)
    )


# What a plan's offload settings put into host memory, asked of Megatron's objects.


_FLOAT32_BYTES = 4
# Adam's; main parameters are float32, too.
_NUM_MOMENTS = 2


def host_need(
    at: RankPlan, models: Mapping[int, Any], optimizer: Any, link: HostLink | None
) -> HostMemoryNeed:
    """What this rank asks of its node; before the first step. `models`: chunk -> wrapped model."""
    pinned, held_bytes = (False, 0) if link is None else (link.is_cuda, link.host_bytes)
    if at.offload.optimizer_state:  # main parameters are there from when they are made
        owned = optimizer.owned_shards
        held_bytes += sum(main.nbytes for _, p, _, main in owned if p.dtype != torch.float32)
    return HostMemoryNeed(
        rank=at.rank,
        node=node_name(),
        by_category_bytes=_by_category(at, models, optimizer, pinned=pinned),
        available_bytes=available_host_bytes(),
        held_bytes=held_bytes,
    )


def _by_category(
    at: RankPlan, models: Mapping[int, Any], optimizer: Any, *, pinned: bool
) -> dict[str, int]:
    """Category -> bytes that wait in the host at most.

    `pinned`: whether the host's memory is pinned, as for a GPU.
    """

    def owned(buffers: Iterable[ShardedBuffer]) -> int:
        return sum(
            host_bytes_of(buffer.num_owned * buffer.full.element_size(), pinned=pinned)
            for buffer in buffers
        )

    offload = at.offload
    need = dict.fromkeys(("parameters", "optimizer state", "gradients", "activations"), 0)
    sharded = {chunk: model.shards for chunk, model in models.items() if model.shards is not None}
    if offload.parameters:
        need["parameters"] = sum(owned(shards.parameters) for shards in sharded.values())
    if offload.gradients:
        away = offloaded_gradients(at.actions)
        need["gradients"] = sum(owned(sharded[c].gradients) for c in models if c in away)
    if offload.optimizer_state:
        need["optimizer state"] = _state_bytes(models, optimizer, pinned=pinned)
    if offload.activations:
        saved = {
            chunk: sum(
                host_bytes_of(size, pinned=pinned) for size in _saved_sizes(at, chunk, model)
            )
            for chunk, model in models.items()
        }
        need["activations"] = most_away(at.actions, saved)
    return need


def _state_bytes(models: Mapping[int, Any], optimizer: Any, *, pinned: bool) -> int:
    """Moments and main parameters: a flat block of each, by chunk (see `HostState`)."""
    total = 0
    for model in models.values():
        owned = [(p, s) for c, p, _, s in optimizer.owned_shards if c is model]
        elements = sum(shard.numel() for _, shard in owned)
        main = sum(s.numel() for p, s in owned if p.dtype != torch.float32)
        blocks = [elements] * _NUM_MOMENTS + [main]
        total += sum(host_bytes_of(_FLOAT32_BYTES * block, pinned=pinned) for block in blocks)
    return total


# What forwards keep in host memory, from the sizes in Megatron's config.
#
# With full recomputation that is known: the layers' inputs. Of other layers it is the memory
# model's list (`costs.model_memory`), which the simulator has, too: kernels may keep a little more
# or less.


def _saved_sizes(at: RankPlan, chunk: int, model: Any) -> list[int]:
    """Bytes of each tensor that a forward of the chunk keeps, of the largest micro-batch."""
    layers = [each for each in model.modules() if isinstance(each, BaseTransformerLayer)]
    if not layers:
        return []
    config = layers[0].config
    samples = max((each.size for each in at.batch.micro_batches), default=0)
    forms = [_layer(config, at.sequence_length, each) for each in layers]
    split = {
        "tensor_parallel": config.tensor_model_parallel_size,
        "sequence_parallel": config.sequence_parallel,
    }
    again = num_recomputed(config, len(layers))
    is_selective = config.recompute_granularity == "selective"
    rest: RecomputeMode = "selective" if is_selective else "none"
    boundary = [samples * each for each in forms[0].tensor_bytes("full", **split)]
    sizes = again * boundary
    for form in forms[again:]:
        sizes += _sizes_of_layer(at, form, rest, samples, **split)
    if chunk == 0 and config.hidden_dropout:  # the embedding's
        sizes += boundary
    if chunk == at.num_chunks - 1:
        # The final norm keeps its input, the head that of its matrix, the loss a softmax.
        logits = get_args().padded_vocab_size // config.tensor_model_parallel_size
        sizes += [*2 * boundary, samples * _FLOAT32_BYTES * at.sequence_length * logits]
    return sizes


def _sizes_of_layer(
    at: RankPlan, form: LayerActivations, mode: RecomputeMode, samples: int, **split: Any
) -> list[int]:
    """Of ranks that share experts: of its own samples, and its experts' rows of all samples, as
    even routing has them."""
    whole, place, experts = form.tensor_bytes(mode, **split), at.expert_place, form.model.experts
    if place is None or experts is None:
        return [samples * each for each in whole]
    no_rows = ExpertsOfRank(**vars(experts), held=0, are_sent_tokens=True)
    own = replace(form, model=replace(form.model, experts=no_rows)).tensor_bytes(mode, **split)
    group, index = at.plan.replica_of_rank(at.rank)
    rows = max(at.plan.groups[group].replicas[index].sizes, default=0) * len(place.experts)
    return [
        samples * mine + -(-rows * (each - mine) // experts.num_experts)
        for mine, each in zip(own, whole, strict=True)
    ]


def num_recomputed(config: Any, num_layers: int) -> int:
    """Layers that keep their input only, as in `megatron.core.recompute.checkpointed_forward`.

    "uniform" is all of them.
    """
    if config.recompute_granularity != "full":
        return 0
    if config.recompute_method != "block":
        return num_layers
    return min(num_layers, config.recompute_num_layers)


def _layer(config: Any, seq_length: int, layer: Any) -> LayerActivations:
    element_bytes = boundary_dtype(config).itemsize
    experts = _experts(config) if isinstance(layer.mlp, MoELayer) else None
    return LayerActivations(
        model=replace(_shape(config, seq_length), experts=experts),
        element_bytes=element_bytes,
        attention=_attention(config, element_bytes),
        computing=Computing(
            hidden_dropout=bool(config.hidden_dropout),
            attention_dropout=bool(config.attention_dropout),
            softmax_in_fp32=bool(config.attention_softmax_in_fp32),
            modules=tuple(config.recompute_modules or ("core_attn",)),
            has_auxiliary_loss=any(auxiliary_losses(get_args()).values()),
            router_bytes=router_bytes(get_args()),
            lora=_lora(getattr(get_args(), "zorse_lora", None)),
        ),
    )


def _shape(config: Any, seq_length: int) -> ModelShape:
    """A layer's sizes; the rest does not matter to what it keeps."""
    is_relu = config.activation_func is torch.nn.functional.relu
    return ModelShape(
        name="config",
        num_layers=1,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.ffn_hidden_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_query_groups,
        kv_channels=config.kv_channels,
        vocab_size=1,
        seq_length=seq_length,
        activation="swiglu" if config.gated_linear_unit else "relu" if is_relu else "gelu",
        qk_norm=config.qk_layernorm,
        latent=_latent(config) if config.multi_latent_attention else None,
    )


def _lora(described: Mapping[str, Any] | None) -> Lora | None:
    """As checkpoints say it of the adapters."""
    if described is None:
        return None
    rank, alpha, targets = (described[name] for name in ("rank", "alpha", "targets"))
    return Lora(rank=rank, alpha=alpha, targets=tuple(targets))


def _latent(config: Any) -> LatentAttention:
    return LatentAttention(
        kv_lora_rank=config.kv_lora_rank,
        q_lora_rank=config.q_lora_rank or 0,
        qk_head_dim=config.qk_head_dim,
        qk_pos_emb_head_dim=config.qk_pos_emb_head_dim,
        v_head_dim=config.v_head_dim,
    )


def _experts(config: Any) -> Experts:
    return Experts(
        num_experts=config.num_moe_experts,
        per_token=config.moe_router_topk,
        ffn_hidden_size=config.moe_ffn_hidden_size,
        shared_ffn_hidden_size=config.moe_shared_expert_intermediate_size or 0,
        has_shared_gate=bool(config.moe_shared_expert_gate),
        scores_all=bool(config.moe_router_pre_softmax),
    )


def _attention(config: Any, element_bytes: int) -> Attention:
    """As `costs.model_memory.attention_on` says it of a kind of GPU."""
    is_asked = config.attention_backend not in (AttnBackend.unfused, AttnBackend.local)
    has_te = config.transformer_impl == "transformer_engine"
    runs = torch.cuda.is_available() and torch.cuda.get_device_capability() >= FLASH_FROM
    return "flash" if runs and has_te and is_asked and element_bytes < _FLOAT32_BYTES else "unfused"
