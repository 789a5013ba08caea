"""Bytes of a transformer on a GPU, as Megatron-Core trains it.

Parameters and gradients are unsharded on every rank of a group; main parameters and Adam's moments
are sharded. What a process has beside tensors is in `process_memory`; the planner's margin is for
fragmentation.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from zorse_megatron.costs.activations import LayerActivations, delayed_elements
from zorse_megatron.costs.attention_kinds import attention_on
from zorse_megatron.costs.efficiency import element_bytes, is_sixteen_bit
from zorse_megatron.costs.interface import RecomputeMode
from zorse_megatron.schema.gpus.gpu import Attention, Dtype
from zorse_megatron.schema.gpus.gpu_presets import GPU_KINDS
from zorse_megatron.schema.model.computing import USUAL, Computing
from zorse_megatron.schema.model.model_shape import ModelShape
from zorse_megatron.schema.profile.profile import Part, PartMemory, Profile

_FLOAT32_BYTES = 4
_MOMENTS_BYTES = 8


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Bytes of each parameter, in each of its forms."""

    parameter_bytes: int
    """As it is computed with."""
    gradient_bytes: int
    """As it is accumulated."""
    state_bytes: int
    """Main parameter, where it is another one, and Adam's two moments."""


class BytesByPrecision:
    """The part of `MemoryCost` that the precision alone decides."""

    precision: Precision

    def parameter_bytes(self, num_parameters: int) -> int:
        """Unsharded parameters as they are computed with."""
        return num_parameters * self.precision.parameter_bytes

    def gradient_bytes(self, num_parameters: int) -> int:
        """Unsharded gradients as they are accumulated."""
        return num_parameters * self.precision.gradient_bytes

    def state_bytes(self, num_parameters: int) -> int:
        """Main parameters and optimizer moments of a shard."""
        return num_parameters * self.precision.state_bytes


def precision_of(dtype: Dtype, *, gradient_bytes: int = _FLOAT32_BYTES) -> Precision:
    """Return what Megatron keeps: 2 + 4 + 12 bytes in 16 bits, 4 + 4 + 8 in float32.

    Megatron accumulates bfloat16 gradients in float32 always, float16 ones with
    `--accumulate-allreduce-grads-in-fp32`; without it `gradient_bytes` is 2.
    """
    main_bytes = _FLOAT32_BYTES if is_sixteen_bit(dtype) else 0
    return Precision(
        parameter_bytes=element_bytes(dtype),
        gradient_bytes=gradient_bytes,
        state_bytes=main_bytes + _MOMENTS_BYTES,
    )


@dataclass(frozen=True, kw_only=True)
class TransformerMemory(BytesByPrecision):
    """`MemoryCost` by formula; what a profile measured of a layer can take its place.

    Sizes are those of one rank of `tensor_parallel`.
    """

    model: ModelShape
    dtype: Dtype
    precision: Precision
    attention: Attention = "flash"
    """On kinds that `attention_by_kind` does not have."""
    attention_by_kind: Mapping[str, Attention] = field(default_factory=dict)
    """Kind of GPU -> what core attention runs there."""
    computing: Computing = USUAL
    """Dropout, and what is recomputed; its attention is not looked at here."""
    tensor_parallel: int = 1
    sequence_parallel: bool = False
    measured_layer_elements: int | None = None
    """What a layer keeps of one sample with nothing recomputed, its input included."""
    measured_attention: Attention | None = None
    """What it was measured with; None: that was not said, and counts as what every kind runs."""
    measured_by_kind: Mapping[str, tuple[int, Attention | None]] = field(default_factory=dict)
    """Kind -> the same elements and attention, of kinds that were measured each."""
    measured_head_elements: int | None = None
    """What the head keeps of one sample."""

    def layer_parameters(self) -> int:
        """Number of parameters of one transformer layer."""
        return self.model.layer_parameters(self.tensor_parallel)

    def embedding_parameters(self) -> int:
        """Number of parameters of the embedding."""
        return self.model.embedding_parameters(self.tensor_parallel)

    def head_parameters(self, *, tied_on_same_rank: bool) -> int:
        """Number of parameters of the final norm and the head.

        A tied head on another rank than the embedding has a copy of the table.
        """
        own = self.model.head_parameters(self.tensor_parallel)
        if self.model.tied_embeddings and not tied_on_same_rank:
            return own + self.model.table_parameters(self.tensor_parallel)
        return own

    def activation_bytes(
        self, micro_batch_size: int, mode: RecomputeMode, kind: str | None = None
    ) -> int:
        """What one layer keeps from forward to backward, its input included.

        What was measured with other attention than the kind runs differs by what the formula says
        that the two keep.
        """
        attention = self.attention_on(kind)
        if mode != "none" or self.measured_layer_elements is None:
            return micro_batch_size * self._computed_bytes(mode, attention)
        of_all_kinds = self.measured_layer_elements, self.measured_attention
        elements, ran = self.measured_by_kind.get(kind or "", of_all_kinds)
        other = 0
        if ran not in (None, attention):
            other = self._computed_bytes(mode, attention)
            other -= self._computed_bytes(mode, ran or attention)
        return micro_batch_size * (elements * element_bytes(self.dtype) + other)

    def kept_tensor_bytes(
        self, micro_batch_size: int, mode: RecomputeMode, kind: str | None = None
    ) -> tuple[int, ...]:
        """`activation_bytes`, tensor by tensor: by formula, in proportion to what was measured."""
        layer = self._layer(self.attention_on(kind))
        each = layer.tensor_bytes(
            mode, tensor_parallel=self.tensor_parallel, sequence_parallel=self.sequence_parallel
        )
        total, computed = self.activation_bytes(micro_batch_size, mode, kind), sum(each)
        bounds = [total * upto // computed for upto in accumulate(each, initial=0)]
        return tuple(stop - start for start, stop in pairwise(bounds))

    def attention_on(self, kind: str | None) -> Attention:
        """Return what core attention runs on a kind of GPU."""
        return self.attention if kind is None else self.attention_by_kind.get(kind, self.attention)

    def _computed_bytes(self, mode: RecomputeMode, attention: Attention) -> int:
        """The formula, for one sample."""
        return self._layer(attention).bytes_per_sample(
            mode, tensor_parallel=self.tensor_parallel, sequence_parallel=self.sequence_parallel
        )

    def _layer(self, attention: Attention) -> LayerActivations:
        return LayerActivations(
            model=self.model,
            element_bytes=element_bytes(self.dtype),
            attention=attention,
            hidden_dropout=self.computing.hidden_dropout,
            attention_dropout=self.computing.attention_dropout,
            softmax_in_fp32=self.computing.softmax_in_fp32,
            modules=self.computing.modules,
        )

    def delayed_bytes(self, micro_batch_size: int) -> int:
        """What one layer keeps from a backward to weight gradients that are computed apart."""
        elements = delayed_elements(
            self.model,
            tensor_parallel=self.tensor_parallel,
            splits_inputs=self.sequence_parallel and self.computing.is_local,
        )
        return micro_batch_size * elements * element_bytes(self.dtype)

    def boundary_bytes(self, micro_batch_size: int) -> int:
        """One activation between two layers, as it is sent."""
        ranks = self.tensor_parallel if self.sequence_parallel else 1
        elements = micro_batch_size * self.model.seq_length * self.model.hidden_size
        return -(-elements // ranks) * element_bytes(self.dtype)

    def head_bytes(self, micro_batch_size: int) -> int:
        """Logits and what the loss keeps while the head runs.

        Of the logits there are the product itself, its softmax in float32 and its gradient; the
        final norm keeps its input and its output.
        """
        width = element_bytes(self.dtype)
        if self.measured_head_elements is not None:
            return micro_batch_size * self.measured_head_elements * width
        logits = self.model.seq_length * self.model.vocab_size // self.tensor_parallel
        # In float32 the softmax takes the place of the logits.
        per_logit = 2 * width + (_FLOAT32_BYTES if is_sixteen_bit(self.dtype) else 0)
        return micro_batch_size * logits * per_logit + 2 * self.boundary_bytes(micro_batch_size)


def memory_from_profile(
    profile: Profile,
    model: ModelShape,
    *,
    dtype: Dtype,
    precision: Precision,
    tensor_parallel: int = 1,
    attention: Attention = "unfused",
    attention_by_kind: Mapping[str, Attention] | None = None,
    computing: Computing = USUAL,
) -> TransformerMemory:
    """Return the memory of a model with what a profile measured of its layers and its head.

    The profile counts the input of a layer as output of the layer before, so it is added. Raises
    LookupError where the profile has nothing of this model, sequence length and split.
    """
    layers = _measured(profile, "layer", model, tensor_parallel)
    heads = _measured(profile, "head", model, tensor_parallel)
    boundary = model.seq_length * model.hidden_size
    layer, head = map(_for_all_kinds, (layers, heads))

    def ran(entry: PartMemory) -> Attention | None:
        """What core attention ran: what is said, or what the kind has."""
        if entry.attention is not None or entry.gpu_kind is None:
            return entry.attention
        known = (attention_by_kind or {}).get(entry.gpu_kind)
        gpu = GPU_KINDS.get(entry.gpu_kind)
        return known or (None if gpu is None else attention_on(gpu, computing, dtype))

    return TransformerMemory(
        model=model,
        dtype=dtype,
        precision=precision,
        attention=attention,
        attention_by_kind=attention_by_kind or {},
        computing=computing,
        tensor_parallel=tensor_parallel,
        measured_layer_elements=layer.activation_elements + boundary,
        measured_attention=ran(layer),
        measured_by_kind={
            each.gpu_kind: (each.activation_elements + boundary, ran(each))
            for each in layers
            if each.gpu_kind
        },
        measured_head_elements=head.activation_elements + boundary,
    )


def _for_all_kinds(entries: Sequence[PartMemory]) -> PartMemory:
    """Return the first that does not say its kind, or else the largest."""
    plain = next((each for each in entries if each.gpu_kind is None), None)
    return plain or max(entries, key=lambda each: each.activation_elements)


def _measured(
    profile: Profile, part: Part, model: ModelShape, tensor_parallel: int
) -> list[PartMemory]:
    """Return every entry of a part; at least one."""
    found = []
    for entry in profile.memory:
        shape = profile.model_named(entry.model)
        is_same = (shape.hidden_size, shape.ffn_hidden_size, entry.seq_length) == (
            model.hidden_size,
            model.ffn_hidden_size,
            model.seq_length,
        )
        if is_same and (entry.part, entry.tensor_parallel) == (part, tensor_parallel):
            found.append(entry)
    if found:
        return found
    raise LookupError(
        f"found no memory of the {part} of {model.name} at sequence length {model.seq_length} with "
        f"tensor parallel {tensor_parallel} in the profile; expected one entry. Import a table "
        "that has it, or use the formula."
    )
