"""Bytes of a model on a GPU: computed as Megatron-Core trains a transformer, or measured.

Parameters and gradients are unsharded on every rank of a group; main parameters and Adam's moments
are sharded. What a process has beside tensors is in `process_memory`; the planner's margin is for
fragmentation.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise

from zorse_megatron.costs.analytic_compute import element_bytes as bytes_of_element
from zorse_megatron.costs.analytic_compute import is_sixteen_bit
from zorse_megatron.costs.interface import ModelSection, RecomputeMode
from zorse_megatron.gpus.gpu import Attention, Dtype, GpuKind
from zorse_megatron.gpus.known_gpus import GPU_KINDS
from zorse_megatron.inputs.lora import Target
from zorse_megatron.inputs.model import USUAL, Computing, Experts, ModelShape, Module
from zorse_megatron.inputs.profile import Part, PartMemory, Profile

# What core attention runs on each kind of GPU.
#
# Transformer Engine chooses on each rank by itself (`get_attention_backend`): flash attention or
# cuDNN's fused attention in 16 bits from compute capability 8.0 on, and unfused attention, which
# keeps all scores, for everything else. Megatron's own layers have unfused attention only.


def attention_on(gpu: GpuKind, computing: Computing, dtype: Dtype) -> Attention:
    """Return what core attention runs on a kind, as far as time and memory depend on it."""
    if computing.attention == "unfused" or not gpu.runs_flash_attention:
        return "unfused"
    if computing.attention is None and not is_sixteen_bit(dtype):
        return "unfused"
    return "flash"


def attention_by_kind(
    kinds: Mapping[str, GpuKind], computing: Computing, dtype: Dtype
) -> dict[str, Attention]:
    """Kind -> what core attention runs there."""
    return {name: attention_on(gpu, computing, dtype) for name, gpu in kinds.items()}


def attention_phrase(by_kind: Mapping[str, Attention]) -> str:
    """Say it of all kinds.

    >>> attention_phrase({"A100-40": "flash", "T4": "unfused", "V100-16": "unfused"})
    'flash attention on A100-40, unfused attention on T4 and V100-16'
    >>> attention_phrase({"A100-40": "flash"})
    'flash attention'
    """
    kinds_of: dict[Attention, list[str]] = {}
    for kind, attention in by_kind.items():
        kinds_of.setdefault(attention, []).append(kind)
    if len(kinds_of) == 1:
        return f"{next(iter(kinds_of))} attention"
    return ", ".join(
        f"{attention} attention on {' and '.join(names)}" for attention, names in kinds_of.items()
    )


# Activations that a transformer layer keeps for its backward, tensor by tensor.
#
# The list is that of Korthikanti et al. 2022 (arXiv 2205.05198, section 4), with the widths of
# grouped queries and gated feed-forward layers in place of theirs, and flash attention (Dao et al.
# 2022) as an alternative: it keeps one number per head and token in place of the score matrix. For
# their GPT the sum is their 34 s b h + 5 a s^2 b bytes.


_MASK_BYTES = 1
_FLOAT32_BYTES = 4
_INDEX_BYTES = 8


@dataclass(frozen=True, kw_only=True)
class Saved:
    """One tensor that is kept, for one sample."""

    name: str
    elements: int
    element_bytes: int
    is_split: bool
    """Whether tensor-parallel ranks hold a part each; the others are whole on every rank, or split
    by sequence parallelism."""
    is_whole: bool = False
    """Whether it is whole on every rank all the same."""
    module: Module | None = None
    """What to recompute so that it need not be kept; None: a part that is kept but by full
    recomputation."""


@dataclass(frozen=True, kw_only=True)
class LayerActivations:
    """How a model's layers are computed, as far as it changes what is kept."""

    model: ModelShape
    element_bytes: int
    attention: Attention = "flash"
    computing: Computing = USUAL
    """Dropout, what is recomputed selectively, routers' losses, and adapters, which keep inputs
    that frozen matrices do not; its attention is not looked at here."""

    def saved(self) -> Iterator[Saved]:
        """Yield every tensor that one layer keeps for one sample."""
        model, hidden = self.model, self.model.hidden_size
        has_dropout, lora = self.computing.hidden_dropout, self.computing.lora
        yield self._tensor("input of the norm before attention", hidden)
        if self._trains("q", "k", "v"):
            yield self._tensor("input of query, key and value", hidden, module="layernorm")
        yield self._split("query, key and value", model.query_width + model.key_value_width)
        if model.latent is not None:
            # Rotated elements of keys are in one tensor with what keys and values come from.
            yield self._tensor("what heads come from", model.latent.down_width)
            yield self._tensor("the same, normalized", model.latent.ranks * model.qk_norm)
        yield from self._scores()
        if self._trains("o"):
            yield self._split("input of the projection", model.context_width)
        elif self.attention == "flash":  # whose backward needs its output
            yield self._split("output of attention", model.context_width, "core_attn")
        if has_dropout:
            yield self._tensor("dropout mask after attention", hidden, _MASK_BYTES)
        yield self._tensor("input of the norm before the feed-forward block", hidden)
        if model.experts is not None:
            yield from self._routed(model.experts)
        else:
            yield from self._dense()
        if has_dropout:
            yield self._tensor("dropout mask after the feed-forward block", hidden, _MASK_BYTES)
        if lora is not None:
            for target in lora.sizes(model):
                yield self._tensor(f"inside the adapter of {target}", lora.rank)

    def _dense(self) -> Iterator[Saved]:
        model = self.model
        if self._trains("gate", "up"):
            yield self._tensor("input of the first matrix", model.hidden_size, module="layernorm")
        if model.activation != "relu":  # its gradient follows from its output
            yield self._split("input of the activation", model.ffn_input_width, "mlp")
        if self._trains("down") or model.activation == "relu":
            yield self._split("input of the second matrix", model.ffn_width, "mlp")

    def _routed(self, experts: Experts) -> Iterator[Saved]:
        """What routers keep, and the rows of experts, in a plan's layers
        (`tests/megatron/test_measure_layers.py`).

        In a TP group each rank has rows of all of them, whatever experts it has: how many rows are
        for which is not known before. Of ranks that share experts alone, one that has none keeps
        what its own tokens need.
        """
        hidden, chosen, all_of_them = self.model.hidden_size, experts.per_token, experts.num_experts
        scored = all_of_them if experts.scores_all else chosen
        balanced = all_of_them if self.computing.has_auxiliary_loss else 0
        score_bytes = self.computing.router_bytes or self.element_bytes
        model, rows = self.model, experts.rows_per_token
        are_computed = experts.num_held > 0
        is_gated, has_input = model.is_gated, model.activation != "relu"
        trains = self._trains("gate", "up", "down")
        # A ReLU's gradient follows from its output, which of experts is kept for their scores.
        kept = experts.shared_ffn_hidden_size
        if trains:
            kept = model.ffn_width if are_computed or not rows else 0
        yield self._tensor("input of the router", hidden, module="layernorm", is_whole=True)
        for name, width, element_bytes in (
            ("rows of the experts", rows * hidden * are_computed * trains, None),
            ("scores", scored, _FLOAT32_BYTES),
            ("chosen experts", chosen, _INDEX_BYTES),
            # Where tokens are sent, half of these bytes are places of the rows that are received.
            (
                "chosen experts in order, and places of their rows",
                3 * chosen,
                _INDEX_BYTES if rows else _INDEX_BYTES // 2,
            ),
            ("scores of the rows", rows, score_bytes),
            ("scores of all experts", all_of_them, score_bytes),
            ("scores in the auxiliary loss", balanced, _FLOAT32_BYTES),
            # Where there is a gate, it is fused with the scores.
            ("activation of the rows", rows * experts.ffn_hidden_size * (not is_gated), None),
        ):
            yield self._tensor(name, width, element_bytes, is_whole=True)
        if experts.has_shared_gate:
            yield self._tensor("output of the shared expert, and its gate", hidden + 1)
        yield self._tensor(
            "input of the activation", model.ffn_input_width * has_input, is_whole=True
        )
        yield self._tensor(
            "input of the second matrix", kept * (trains or not has_input), is_whole=True
        )

    def _trains(self, *targets: Target) -> bool:
        """Whether gradients of weights need the input that these matrices share."""
        lora = self.computing.lora
        return lora is None or not set(targets).isdisjoint(lora.targets)

    def bytes_per_sample(
        self, mode: RecomputeMode, *, tensor_parallel: int = 1, sequence_parallel: bool = False
    ) -> int:
        """Return what one layer keeps of one sample on each rank."""
        return sum(
            self.tensor_bytes(
                mode, tensor_parallel=tensor_parallel, sequence_parallel=sequence_parallel
            )
        )

    def tensor_bytes(
        self, mode: RecomputeMode, *, tensor_parallel: int = 1, sequence_parallel: bool = False
    ) -> tuple[int, ...]:
        """Return the bytes of each tensor that one layer keeps of one sample on each rank."""
        whole = tensor_parallel if sequence_parallel else 1
        found = []
        for tensor in self.saved():
            if mode == "full" and tensor.name != "input of the norm before attention":
                continue
            # A sequence that has been gathered is kept, whatever it was gathered from.
            is_again = not (tensor.is_whole and whole > 1)
            if mode == "selective" and is_again and tensor.module in self.computing.modules:
                continue
            ranks = tensor_parallel if tensor.is_split else 1 if tensor.is_whole else whole
            found.append(-(-tensor.elements // ranks) * tensor.element_bytes)
        return tuple(found)

    def _scores(self) -> Iterator[Saved]:
        """What core attention keeps."""
        heads = self.model.num_attention_heads
        if self.attention == "flash":
            width, kept = heads, {"sums of the softmax": _FLOAT32_BYTES}
        else:
            width = heads * self.model.seq_length
            is_wide = self.computing.softmax_in_fp32 and self.element_bytes < _FLOAT32_BYTES
            kept = {"softmax": _FLOAT32_BYTES if is_wide else self.element_bytes}
            if self.computing.attention_dropout:
                kept["dropout mask of the softmax"] = _MASK_BYTES
                kept["its output"] = self.element_bytes
            elif is_wide:
                kept["probabilities"] = self.element_bytes
        for name, element_bytes in kept.items():
            yield self._tensor(name, width, element_bytes, is_split=True, module="core_attn")

    def _split(self, name: str, width: int, module: Module | None = None) -> Saved:
        return self._tensor(name, width, is_split=True, module=module)

    def _tensor(
        self,
        name: str,
        width: int,
        element_bytes: int | None = None,
        *,
        is_split: bool = False,
        is_whole: bool = False,
        module: Module | None = None,
    ) -> Saved:
        """So many elements for each token; `element_bytes`: None: as all activations."""
        return Saved(
            name=name,
            elements=self.model.seq_length * width,
            element_bytes=self.element_bytes if element_bytes is None else element_bytes,
            is_split=is_split,
            is_whole=is_whole,
            module=module,
        )


def delayed_elements(
    model: ModelShape, *, tensor_parallel: int = 1, splits_inputs: bool = False
) -> int:
    """Return what gradients of a layer's matrices are computed from, for one sample.

    That is the inputs of the matrices, and the gradients of their outputs; of experts those of each
    that a token passes, while a router's own are not computed apart. `splits_inputs`: with
    sequence parallelism Megatron's own layers keep their part of the sequence of the inputs of the
    first matrix of each block; Transformer Engine's keep what they have gathered. The gradients of
    the outputs of the second are whole on every rank, and so is all of experts, if it has any.
    """
    ranks = tensor_parallel if splits_inputs else 1
    split = model.context_width + model.projected_width
    feed_forward = model.ffn_width + model.ffn_input_width
    blocks, whole = model.hidden_size, 0  # of attention
    if model.latent is not None:
        whole += model.latent.ranks + model.latent.down_width
    if model.experts is None:
        blocks, split = 2 * blocks, split + feed_forward
    elif model.experts.num_held or not model.experts.rows_per_token:
        whole += 2 * model.ffn_blocks * model.hidden_size + feed_forward
    per_token = blocks + -(-blocks // ranks) + -(-split // tensor_parallel) + whole
    return model.seq_length * per_token


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
        parameter_bytes=bytes_of_element(dtype),
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
        """Number of parameters of one transformer layer that are trained."""
        lora = self.computing.lora
        if lora is not None:
            return lora.layer_parameters(self.model, self.tensor_parallel)
        return self._base_parameters("layer")

    def embedding_parameters(self) -> int:
        """Number of parameters of the embedding that are trained."""
        return 0 if self.computing.lora else self._base_parameters("embedding")

    def head_parameters(self, *, tied_on_same_rank: bool) -> int:
        """Number of parameters of the final norm and the head that are trained."""
        if self.computing.lora:
            return 0
        return self._base_parameters("head", tied_on_same_rank=tied_on_same_rank)

    def frozen_parameters(self, section: ModelSection, *, tied_on_same_rank: bool = False) -> int:
        """Number of parameters that stay as they are, whole on every GPU; 0 but with adapters."""
        if self.computing.lora is None:
            return 0
        return self._base_parameters(section, tied_on_same_rank=tied_on_same_rank)

    def _base_parameters(self, section: ModelSection, *, tied_on_same_rank: bool = False) -> int:
        """Of the model without adapters.

        A tied head on another rank than the embedding has a copy of the table.
        """
        model, ranks = self.model, self.tensor_parallel
        if section == "layer":
            return model.layer_parameters(ranks)
        if section == "embedding":
            return model.embedding_parameters(ranks)
        is_copied = model.tied_embeddings and not tied_on_same_rank
        return model.head_parameters(ranks) + is_copied * model.table_parameters(ranks)

    def activation_bytes(
        self, micro_batch_size: int, mode: RecomputeMode, kind: str | None = None
    ) -> int:
        """What one layer keeps from forward to backward, its input included.

        What was measured with other attention than the kind runs, and of weights that are trained,
        differs by what the formula says that the two keep.
        """
        attention = self.attention_on(kind)
        if mode != "none" or self.measured_layer_elements is None:
            return micro_batch_size * self._computed_bytes(mode, attention)
        of_all_kinds = self.measured_layer_elements, self.measured_attention
        elements, ran = self.measured_by_kind.get(kind or "", of_all_kinds)
        other = 0
        if ran not in (None, attention) or self.computing.lora is not None:
            trained = replace(self, computing=replace(self.computing, lora=None))
            other = self._computed_bytes(mode, attention)
            other -= trained._computed_bytes(mode, ran or attention)
        return micro_batch_size * (elements * bytes_of_element(self.dtype) + other)

    def saved_tensor_bytes(
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
            element_bytes=bytes_of_element(self.dtype),
            attention=attention,
            computing=self.computing,
        )

    def delayed_bytes(self, micro_batch_size: int) -> int:
        """What one layer keeps from a backward to weight gradients that are computed apart."""
        elements = delayed_elements(
            self.model,
            tensor_parallel=self.tensor_parallel,
            splits_inputs=self.sequence_parallel and self.computing.is_local,
        )
        return micro_batch_size * elements * bytes_of_element(self.dtype)

    def arriving_bytes(self, micro_batch_size: int) -> int:
        """Gradients of what a layer's last matrices return, of experts for a whole sequence."""
        if self.model.experts is None:
            return self.boundary_bytes(micro_batch_size)
        return self.model.ffn_blocks * self._activation_bytes(micro_batch_size, 1)

    def boundary_bytes(self, micro_batch_size: int) -> int:
        """One activation between two layers, as it is sent."""
        ranks = self.tensor_parallel if self.sequence_parallel else 1
        return self._activation_bytes(micro_batch_size, ranks)

    def _activation_bytes(self, micro_batch_size: int, ranks: int) -> int:
        elements = micro_batch_size * self.model.seq_length * self.model.hidden_size
        return -(-elements // ranks) * bytes_of_element(self.dtype)

    def head_bytes(self, micro_batch_size: int) -> int:
        """Logits and what the loss keeps while the head runs.

        Of the logits there are the product itself, its softmax in float32 and its gradient; the
        final norm keeps its input and its output, which an output layer that is frozen does not
        need.
        """
        width, boundary = bytes_of_element(self.dtype), self.boundary_bytes(micro_batch_size)
        unneeded = boundary if self.computing.lora else 0
        if self.measured_head_elements is not None:
            return micro_batch_size * self.measured_head_elements * width - unneeded
        logits = self.model.seq_length * self.model.vocab_size // self.tensor_parallel
        # In float32 the softmax takes the place of the logits.
        per_logit = 2 * width + (_FLOAT32_BYTES if is_sixteen_bit(self.dtype) else 0)
        return micro_batch_size * logits * per_logit + 2 * boundary - unneeded


def memory_from_profile(profile: Profile, formula: TransformerMemory) -> TransformerMemory:
    """Return the memory of a model with what a profile measured of its layers and its head.

    The profile counts the input of a layer as output of the layer before, so it is added. Raises
    LookupError where the profile has nothing of this model, sequence length and split.
    """
    model = formula.model
    layers = _measured(profile, "layer", model, formula.tensor_parallel)
    heads = _measured(profile, "head", model, formula.tensor_parallel)
    boundary = model.seq_length * model.hidden_size
    layer, head = map(_for_all_kinds, (layers, heads))
    return replace(
        formula,
        measured_layer_elements=layer.activation_elements + boundary,
        measured_attention=_ran(layer, formula),
        measured_by_kind={
            each.gpu_kind: (each.activation_elements + boundary, _ran(each, formula))
            for each in layers
            if each.gpu_kind
        },
        measured_head_elements=head.activation_elements + boundary,
    )


def _ran(entry: PartMemory, formula: TransformerMemory) -> Attention | None:
    """What core attention ran: what is said, or what the kind has."""
    if entry.attention is not None or entry.gpu_kind is None:
        return entry.attention
    known = formula.attention_by_kind.get(entry.gpu_kind)
    gpu = GPU_KINDS.get(entry.gpu_kind)
    return known or (None if gpu is None else attention_on(gpu, formula.computing, formula.dtype))


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
        width = (model.hidden_size, model.ffn_hidden_size, model.experts, model.latent)
        of_entry = (shape.hidden_size, shape.ffn_hidden_size, shape.experts, shape.latent)
        is_same = (*of_entry, entry.seq_length) == (*width, model.seq_length)
        if is_same and (entry.part, entry.tensor_parallel) == (part, tensor_parallel):
            found.append(entry)
    if found:
        return found
    raise LookupError(
        f"found no memory of the {part} of {model.name} at sequence length {model.seq_length} with "
        f"tensor parallel {tensor_parallel} in the profile; expected one entry. Import a table "
        "that has it, or use the formula."
    )
