"""Uneven TP shards of a tensor-parallel group: sizes, and ranks without heads or rows.

Megatron's layers divide numbers of heads, groups, columns and rows by the ranks of the TP group. A
rank that holds n of them is told n times the number of ranks, so that all of its own divisions, in
its layers and in Transformer Engine's, come to n. What is left are the rows of the vocabulary, of
which a rank must know the first one: stock takes it that all ranks before have as many.
"""

import copy
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.training.models.gpt import default_layer_spec

from zorse_megatron.adapter.checkpoint.saved_parameters import saved_as_nothing
from zorse_megatron.adapter.groups.global_groups import presented
from zorse_megatron.adapter.parameter_parts import mark_unit
from zorse_megatron.adapter.patches.rebind import Make, Replacements
from zorse_megatron.errors import PlanError
from zorse_megatron.runtime.mailbox import TpRank


class LocalSizes:
    """What one rank's model config says, and what the model is."""

    def __init__(self, model_config: Any, place: TpRank) -> None:
        """`model_config`: the script's (`cfg_container.model`), as for the whole model."""
        self.place = place
        transformer = model_config.transformer
        groups = transformer.num_query_groups
        heads = transformer.num_attention_heads // groups
        local_groups = self._told("kv_groups", groups)
        layer_spec = model_config.transformer_layer_spec
        if not local_groups:  # a number that stock divides by: it is told one group per rank
            local_groups = place.degree
            layer_spec = layer_spec_with(replacing_attention(SelfAttentionWithoutHeads), layer_spec)
        in_transformer: dict[str, Any] = {
            "num_query_groups": local_groups,
            "num_attention_heads": local_groups * heads,
            "ffn_hidden_size": self._told("mlp_columns", transformer.ffn_hidden_size),
            # They get a single process's weights; stock cannot initialise none on the CPU.
            "perform_initialization": False,
        }
        if not in_transformer["ffn_hidden_size"]:
            # Fused activations cannot reshape what has no columns, and have nothing to do.
            in_transformer["bias_activation_fusion"] = False
        in_model = {
            "vocab_size": self._told("vocabulary_rows", model_config.vocab_size),
            "transformer_layer_spec": layer_spec,
        }
        self._sizes = ((transformer, in_transformer), (model_config, in_model))

    def _told(self, kind: Any, whole: int) -> int:
        start, stop = self.place.tp_shards.interval(kind, self.place.index, whole)
        return (stop - start) * self.place.degree

    def show(self) -> None:
        """Let the config say, from now on, this rank's sizes."""
        self._whole = []
        for config, sizes in self._sizes:
            self._whole.append((config, {name: getattr(config, name) for name in sizes}))
            for name, value in sizes.items():
                setattr(config, name, value)

    def whole(self) -> AbstractContextManager[Any]:
        """Within the block, the config says the sizes of the whole model."""
        stack = ExitStack()
        for config, sizes in self._whole:
            stack.enter_context(presented(config, **sizes))
        return stack


def size_hooks(place: TpRank | None) -> Replacements:
    """What Megatron asks of sizes beside the config, on a rank with other parts than its TP
    group's."""
    hooks: dict[str, Make] = {}
    if place is None:
        return hooks
    if place.tp_shards.units("vocabulary_rows") is not None:
        hooks["vocab_range"] = partial(_with_own_rows, place)
    if not place.tp_shards.has_any("vocabulary_rows", place.index):
        hooks["look_up"] = looking_up_nothing
        hooks["loss"] = without_a_logit
    has_columns = place.tp_shards.has_any("mlp_columns", place.index)
    if not has_columns or place.tp_shards.units("experts") is not None:
        hooks["split_gate"] = saved_as_nothing
    if not place.tp_shards.are_equal:
        hooks["frozen_backward"] = of_any_width
    return hooks


def of_any_width(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the backward of frozen linear layers, for outputs of no width."""

    def backward(ctx: Any, grad_output: torch.Tensor) -> Any:
        if grad_output.shape[-1]:
            return stock(ctx, grad_output)
        (weight,) = ctx.saved_tensors
        with_row = _With(ctx, saved_tensors=(F.pad(weight, (0, 0, 0, 1)),))
        return stock(with_row, F.pad(grad_output, (0, 1)))

    return backward


class _With:
    """An object as it would be with other attributes."""

    def __init__(self, given: Any, **attributes: Any) -> None:
        self._given = given
        vars(self).update(attributes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._given, name)


def _with_own_rows(place: TpRank, stock: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `VocabUtility.vocab_range_from_per_partition_vocab_size`, for a rank of a TP group."""
    rows = place.tp_shards.units("vocabulary_rows")
    assert rows is not None, "equal rows are stock's own"

    def vocab_range_from_per_partition_vocab_size(
        per_partition_vocab_size: int, rank: int, world_size: int
    ) -> Any:
        if world_size != place.degree:  # the whole model is built on one rank
            return stock(per_partition_vocab_size, rank, world_size)
        # Without rows there is a logit of none of them (`without_a_logit`).
        start = sum(rows[:rank])
        return start, start + rows[rank]

    return vocab_range_from_per_partition_vocab_size


# Attention on a rank that holds no KV group.
#
# The rank has nothing to attend with, but it takes part in what the others of its TP group sum:
# forward the output of the projection, to which it adds zeros, and backward the gradient of the
# input, or with sequence parallelism their gathers and reduce-scatters. Megatron's two linear
# layers do all of that with no rows and no columns, so the class is those two and nothing between
# them.


class SelfAttentionWithoutHeads(SelfAttention):
    """`SelfAttention` whose projections have no rows and no columns; core attention is not run.

    The config says one KV group for each rank of the TP group, which tells how large one would be.
    """

    def __init__(self, config: Any, submodules: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(
            config,
            replace(
                submodules,
                linear_qkv=partial(without_rows, submodules.linear_qkv),
                linear_proj=partial(without_columns, submodules.linear_proj),
            ),
            *args,
            **kwargs,
        )

    def forward(self, hidden_states: Any, *_args: Any, **_kwargs: Any) -> Any:
        """[sequence, samples, hidden], and the bias that is added after the sum."""
        nothing, _ = self.linear_qkv(hidden_states)
        return self.linear_proj(nothing)


class ToNothing:
    """Attention of a rank that shares experts and has no samples; its gradients are zeros."""

    def forward(self, hidden_states: Any, *_args: Any, **_kwargs: Any) -> Any:
        """[sequence, 0, hidden], which Megatron's own cannot divide into heads, and no bias."""
        return hidden_states, None


class SelfAttentionToNothing(ToNothing, SelfAttention):
    """See `ToNothing`."""


class LatentAttentionToNothing(ToNothing, MLASelfAttention):
    """See `ToNothing`."""


class MLPToNothing(MLP):
    """The same of a dense layer, whose fused activation cannot be shaped without elements."""

    def forward(self, hidden_states: Any, *_args: Any, **_kwargs: Any) -> Any:
        """[sequence, 0, hidden], and no bias."""
        return hidden_states, None


def without_rows(
    build: Callable[..., Any], input_size: int, output_size: int, **kwargs: Any
) -> Any:
    """A `ColumnParallelLinear` with no output."""
    linear = build(input_size, 0, **kwargs)
    mark_unit(linear, output_size // kwargs["tp_group"].size())
    return linear


def without_columns(
    build: Callable[..., Any], input_size: int, output_size: int, **kwargs: Any
) -> Any:
    """A `RowParallelLinear` with no input."""
    linear = build(0, output_size, **kwargs)
    mark_unit(linear, input_size // kwargs["tp_group"].size())
    return linear


def layer_spec_with(change: Callable[[Any], None], given: Any) -> Callable[..., Any]:
    """What takes the place of a model config's `transformer_layer_spec`, which is `given`.

    `change`: is given the spec of each layer; several may be one.
    """

    def transformer_layer_spec(model_config: Any, vp_stage: int | None = None) -> Any:
        if given is None:
            spec = default_layer_spec(model_config, vp_stage)
        elif isinstance(given, ModuleSpec) or not callable(given):
            spec = copy.deepcopy(given)
        elif "vp_stage" in inspect.signature(given).parameters:  # as `GPTModelBuilder` asks
            spec = given(model_config, vp_stage=vp_stage)
        else:
            spec = given(model_config)
        for layer in getattr(spec, "layer_specs", [spec]):
            change(layer)
        return spec

    return transformer_layer_spec


def replacing_attention(taken: type[SelfAttention]) -> Callable[[Any], None]:
    """Let layers have this attention in place of Megatron's."""
    return partial(_replace_attention, taken)


def _replace_attention(taken: type[SelfAttention], layer: Any) -> None:
    attention, is_nothing = layer.submodules.self_attention, issubclass(taken, ToNothing)
    if is_nothing and issubclass(attention.module, MLASelfAttention):
        attention.module = LatentAttentionToNothing
    elif attention.module not in (SelfAttention, taken):  # layers of experts share one spec
        raise PlanError.of(
            "The plan has a rank without KV groups, or without samples",
            where="the layers of the model",
            found=f"attention of class {attention.module}",
            expected="Megatron's SelfAttention",
            remedy="Give each rank of a TP group at least one KV group, and each of those "
            "that share experts a sample.",
        )
    else:
        attention.module = taken
    dense = layer.submodules.mlp
    if is_nothing and getattr(dense, "func", None) == MLP.as_mlp_submodule:
        layer.submodules.mlp = partial(MLPToNothing.as_mlp_submodule, *dense.args, **dense.keywords)


# Embedding and loss on a rank that holds no row of the vocabulary.
#
# Megatron's lookup needs a row, and its cross entropy a logit for each token. Both get one that
# changes nothing: a row of zeros, whose result is masked as that of every row that another rank
# has, and a logit of minus infinity, which is no maximum and adds nothing to the sum. The sums over
# the TP group, forward and backward, are Megatron's own.


def looking_up_nothing(stock: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap `VocabParallelEmbedding.forward`."""

    def forward(self: Any, input_: torch.Tensor) -> torch.Tensor:
        if not len(self.weight):
            # Made of the weight, so that backwards take part in what the TP group gathers there.
            self = _With(self, weight=F.pad(self.weight, (0, 0, 0, 1)))
        return stock(self, input_)

    return forward


def without_a_logit(stock: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap `LanguageModule.compute_language_model_loss`."""

    def compute_language_model_loss(
        self: Any, labels: torch.Tensor, logits: torch.Tensor
    ) -> torch.Tensor:
        if not logits.shape[-1]:
            logits = F.pad(logits, (0, 1), value=-torch.inf)
        return stock(self, labels, logits)

    return compute_language_model_loss


# torch's own norms under sequence parallelism.
#
# A norm works position by position, so it needs nothing to run on a part of the sequence; its
# weights must only be marked as having seen a part (`adapter.data_parallel.buckets`). Stock marks
# Apex's and Transformer Engine's norms, and refuses torch's, which `--transformer-impl local` has
# without Apex.


def with_sequence_parallelism(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `WrappedTorchNorm.__new__`."""

    def new_norm(cls: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
        if not config.sequence_parallel:
            return stock(cls, config, *args, **kwargs)
        with presented(config, sequence_parallel=False):
            norm = stock(cls, config, *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = True
        return norm

    return new_norm
