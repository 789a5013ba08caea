"""Times from a profile: measured where the model was measured, scaled or analytic elsewhere.

A layer of another shape or sequence length is scaled from its closest measured relative: the time
measured at the same number of tokens, times the ratio of the two analytic times. On the public
times this is off by 5 % in the mean where the analytic model alone is off by 6 % and the plain
ratio of operations by 6 % (docs/simulator.md).
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from operator import itemgetter
from statistics import median

import numpy as np

from zorse_megatron.costs.analytic_compute import (
    AnalyticCompute,
    is_sixteen_bit,
    layer_flops,
    selective_share,
    step_bytes_per_parameter,
)
from zorse_megatron.costs.interface import (
    Basis,
    LayerTimes,
    PassTimes,
    Provenance,
    RecomputeMode,
    off_by,
)
from zorse_megatron.costs.measured_curves import Curve, fit_curve
from zorse_megatron.costs.own_speeds import equal_kinds
from zorse_megatron.gpus.gpu import Attention, Dtype, GpuKind
from zorse_megatron.gpus.known_gpus import GPU_KINDS
from zorse_megatron.inputs.model import USUAL, Computing, ModelShape
from zorse_megatron.inputs.profile import Part, Profile, Times

# How unlike two series are that differ in one thing, against a factor of e in parameters (1.0).
# Fitted by leaving out each series of the public times in turn: a model of another family is worse
# than a shorter sequence of the same one.
_PER_SEQUENCE_FACTOR = 0.5
_PER_PARALLEL_FACTOR = 2.0
_OTHER_FAMILY = 1.0
_OTHER_SHAPE = 0.1
_OTHER_DTYPE = 0.2
_OTHER_KIND = 0.3


@dataclass(frozen=True)
class Series:
    """Measured times of one part, as curves."""

    times: Times
    model: ModelShape
    """With the sequence length of the times."""

    @cached_property
    def forward(self) -> Curve:
        """Forward time by micro-batch size."""
        return fit_curve(self.times.micro_batch_sizes, self.times.forward_s)[0]

    @cached_property
    def backward(self) -> Curve:
        """Backward time by micro-batch size."""
        return fit_curve(self.times.micro_batch_sizes, self.times.backward_s)[0]

    def weight_gradients_share(self, size: float) -> float | None:
        """Of the backward, between the sizes that were measured; None: it was not."""
        if self.times.weight_gradients_s is None:
            return None
        columns = zip(self.times.weight_gradients_s, self.times.backward_s, strict=True)
        shares = [weights_s / backward_s for weights_s, backward_s in columns]
        return float(np.interp(size, self.times.micro_batch_sizes, shares))


def _is_like(series: Series, part: Part, model: ModelShape, tensor_parallel: int) -> bool:
    """Whether times of a series say anything of a part of this model."""
    if part == "layer":  # none is a multiple of a layer of another kind
        return (series.model.experts, series.model.latent) == (model.experts, model.latent)
    # Embedding and head answer only for the same table and the same split.
    split = series.times.tensor_parallel, tensor_parallel
    sizes = ((m.hidden_size, m.vocab_size, m.seq_length) for m in (series.model, model))
    return len({*split}) == 1 == len({*sizes})


def _is_same_rate(one: Dtype, other: Dtype) -> bool:
    """float16 and bfloat16 answer for each other; both run at one rate where both exist."""
    return one == other or (is_sixteen_bit(one) and is_sixteen_bit(other))


def _layer_shape(model: ModelShape) -> tuple[object, ...]:
    heads = (model.num_attention_heads, model.num_query_groups, model.kv_channels)
    return (model.hidden_size, model.ffn_hidden_size, model.activation, model.latent, *heads)


def _parts_of_backward(compute: AnalyticCompute, kind: str, size: float) -> tuple[float, float]:
    """Seconds of a layer's weight gradients, and of the rest of its backward."""
    weights_s = compute.weight_gradients_s(kind, size)
    return weights_s, compute.layer(kind, size).backward_s - weights_s


class ProfiledCompute:
    """`ComputeCost` from a profile; model, sequence length, dtype are fixed.

    `kinds` are the figures of the cluster's GPUs, for what the profile does not have.
    """

    def __init__(
        self,
        profile: Profile,
        model: ModelShape,
        *,
        dtype: Dtype,
        kinds: Mapping[str, GpuKind] = GPU_KINDS,
        tensor_parallel: int = 1,
        computing: Computing = USUAL,
        whole: ModelShape | None = None,
    ) -> None:
        """`computing`: of what is computed and not measured; times of a profile are as measured, of
        all weights that are trained. With adapters they change as their analytic times do.

        `whole`: the model, where `model` says the sizes of a rank's unequal part. Layers of all
        parts are scaled from what is closest to the whole. Were it what is closest to each part, a
        part would be cheap for having the size of something that was measured to be fast.
        """
        self.profile = profile
        self.whole = whole or model
        self.computing = computing
        self.model = model
        self.dtype: Dtype = dtype
        self.kinds = kinds
        self.tensor_parallel = tensor_parallel
        self.analytic = self._analytic_for(model, tensor_parallel)
        self.adapted = self._analytic_for(model, tensor_parallel, computing)
        """The same with the adapters that there are."""
        self._found: dict[tuple[Part, str], tuple[Series, float] | None] = {}
        self._times: dict[tuple[Part, str, int], PassTimes] = {}
        self._step_s_per_parameter: dict[str, float | None] = {}
        self._relatives: dict[str, AnalyticCompute] = {}

    def layer(self, kind: str, micro_batch_size: int) -> PassTimes:
        """One transformer layer, nothing recomputed. Raises LookupError for an unknown kind."""
        return self._cached("layer", kind, micro_batch_size)

    def layer_in_two(self, kind: str, micro_batch_size: int) -> LayerTimes:
        """The same as its attention and its MLP, divided as their analytic times are.

        What does not depend on the size of either, such as norms, is in both by half.
        """
        whole = self.layer(kind, micro_batch_size)
        forward, backward = self._attention_shares(kind, micro_batch_size)
        attention = PassTimes(
            forward_s=forward * whole.forward_s, backward_s=backward * whole.backward_s
        )
        mlp = PassTimes(
            forward_s=whole.forward_s - attention.forward_s,
            backward_s=whole.backward_s - attention.backward_s,
        )
        return LayerTimes(attention=attention, mlp=mlp)

    def _attention_shares(self, kind: str, micro_batch_size: int) -> tuple[float, float]:
        """Of a layer's forward and of its backward."""
        whole = self.adapted.layer(kind, micro_batch_size)
        attention, mlp = (each.layer(kind, micro_batch_size) for each in self._halves)
        return (
            (1 + (attention.forward_s - mlp.forward_s) / whole.forward_s) / 2,
            (1 + (attention.backward_s - mlp.backward_s) / whole.backward_s) / 2,
        )

    @cached_property
    def _halves(self) -> tuple[AnalyticCompute, AnalyticCompute]:
        """Of layers without an MLP, and without attention."""
        attention = replace(self.model, ffn_hidden_size=0, experts=None)
        mlp = replace(self.model, num_attention_heads=0, num_query_groups=0, latent=None)
        return self._half(attention, in_attention=True), self._half(mlp, in_attention=False)

    def _half(self, model: ModelShape, *, in_attention: bool) -> AnalyticCompute:
        """With those of the adapters that it has."""
        lora, computing = self.computing.lora, self.computing
        if lora is not None:
            sizes = lora.sizes(self.model).items()
            own = tuple(name for name, size in sizes if size.in_attention == in_attention)
            computing = replace(computing, lora=replace(lora, targets=own))
        return self._analytic_for(model, self.tensor_parallel, computing)

    def embedding(self, kind: str, micro_batch_size: int) -> PassTimes:
        """Token (and position) embedding."""
        return self._cached("embedding", kind, micro_batch_size)

    def head(self, kind: str, micro_batch_size: int) -> PassTimes:
        """Final norm, output layer and loss."""
        return self._cached("head", kind, micro_batch_size)

    def recompute_s(self, kind: str, micro_batch_size: int, mode: RecomputeMode) -> float:
        """What recomputing one layer adds to its backward."""
        if mode == "none":
            return 0.0
        forward_s = self.layer(kind, micro_batch_size).forward_s
        return forward_s * (1.0 if mode == "full" else selective_share(self.model, self.computing))

    def weight_gradients_s(self, kind: str, micro_batch_size: int) -> float:
        """What gradients of its matrices take of one layer's backward: their share as measured, of
        a relative as its analytic share differs, or their analytic share. Nothing with adapters.
        """
        if self.computing.lora is not None:
            return 0.0
        backward_s = self.layer(kind, micro_batch_size).backward_s
        found = self._closest("layer", kind)
        if found is not None and found[0].times.weight_gradients_s is not None:
            return backward_s * self._measured_share(*found, kind, micro_batch_size)
        analytic_s = self.analytic.layer(kind, micro_batch_size).backward_s
        return backward_s * self.analytic.weight_gradients_s(kind, micro_batch_size) / analytic_s

    def step_s(self, kind: str, num_parameters: int) -> float:
        """Optimizer step on a shard: measured per parameter, or by memory traffic."""
        if kind not in self._step_s_per_parameter:
            self._step_s_per_parameter[kind] = self._measured_step(kind)
        rate = self._step_s_per_parameter[kind]
        return self.analytic.step_s(kind, num_parameters) if rate is None else rate * num_parameters

    def provenance(self, kind: str) -> Provenance:
        """Say what the times of a kind rest on. Raises LookupError for an unknown kind."""
        found = self._closest("layer", kind)
        if found is None:
            return self.analytic.provenance(kind)
        series, distance = found
        times = series.times
        said = (
            f"{times.model} on {times.gpu_kind} at sequence length {times.seq_length} in "
            f"{times.dtype}, tensor parallel {times.tensor_parallel}; {times.source}"
        )
        source = next(each for each in self.profile.sources if each.name == times.source)
        basis: Basis = "scaled" if distance else source.kind
        error = off_by(basis, sixteen_bit=is_sixteen_bit(self.dtype))
        has_weights = times.weight_gradients_s is not None
        return Provenance(basis=basis, detail=said, off_by=error, has_weight_gradients=has_weights)

    def includes_collectives(self, kind: str, section: Part) -> bool:
        """Whether the times were measured in a TP group, so that its collectives are in them.

        In one of as many ranks: times of TP groups of other degrees are not used.
        """
        found = self._closest(section, kind)
        return found is not None and found[0].times.tensor_parallel > 1

    def measured_attention(self, kind: str) -> Attention | None:
        """Which core attention ran when the layers that a kind's times rest on were measured.

        None: nothing was measured, or the profile does not say.
        """
        found = self._closest("layer", kind)
        return None if found is None else found[0].times.attention

    def _cached(self, part: Part, kind: str, micro_batch_size: int) -> PassTimes:
        key = (part, kind, micro_batch_size)
        if key not in self._times:
            if micro_batch_size < 1:
                raise ValueError(f"found micro-batch size {micro_batch_size}; expected 1 or more")
            times = self._times_of(part, kind, micro_batch_size)
            if self.computing.lora is not None:
                times = self._with_adapters(times, part, kind, micro_batch_size)
            self._times[key] = times
        return self._times[key]

    def _with_adapters(
        self, trained: PassTimes, part: Part, kind: str, micro_batch_size: int
    ) -> PassTimes:
        """What takes so long where all weights are trained, if adapters alone are."""
        before, after = (
            getattr(each, part)(kind, micro_batch_size) for each in (self.analytic, self.adapted)
        )
        forward = after.forward_s / before.forward_s
        backward = after.backward_s / before.backward_s
        found = self._closest(part, kind) if part == "layer" else None
        if found is not None and found[0].times.weight_gradients_s is not None:
            adapters_s = after.backward_s - self._frozen.layer(kind, micro_batch_size).backward_s
            backward = 1 - self._measured_share(*found, kind, micro_batch_size)
            backward += adapters_s / before.backward_s
        return PassTimes(
            forward_s=trained.forward_s * forward, backward_s=trained.backward_s * backward
        )

    @cached_property
    def _frozen(self) -> AnalyticCompute:
        """Without adapters, and without gradients of weights."""
        lora = self.computing.lora
        without = replace(self.computing, lora=lora and replace(lora, targets=()))
        return self._analytic_for(self.model, self.tensor_parallel, without)

    def _times_of(self, part: Part, kind: str, micro_batch_size: int) -> PassTimes:
        """Where all weights are trained."""
        found = self._closest(part, kind)
        if found is not None:
            return self._scaled(*found, kind, micro_batch_size)
        if part == "layer":
            return self.analytic.layer(kind, micro_batch_size)
        if part == "embedding":
            return self.analytic.embedding(kind, micro_batch_size)
        return self._head_like_layer(kind, micro_batch_size)

    def _scaled(
        self, series: Series, distance: float, kind: str, micro_batch_size: int
    ) -> PassTimes:
        """Return the measured time at as many tokens, times the ratio of the analytic times."""
        if not distance:
            return PassTimes(
                forward_s=series.forward.at(micro_batch_size),
                backward_s=series.backward.at(micro_batch_size),
            )
        sizes = series.times.micro_batch_sizes
        size = micro_batch_size * self.model.seq_length / series.model.seq_length
        size = min(max(size, sizes[0]), sizes[-1])
        own = self.analytic.layer(kind, micro_batch_size)
        other = self._relative(series).layer(kind, size)
        return PassTimes(
            forward_s=series.forward.at(size) * (own.forward_s / other.forward_s),
            backward_s=series.backward.at(size) * (own.backward_s / other.backward_s),
        )

    def _measured_share(
        self, series: Series, distance: float, kind: str, micro_batch_size: int
    ) -> float:
        """Weight gradients, of the layer's backward."""
        size = micro_batch_size * self.model.seq_length / series.model.seq_length
        share = series.weight_gradients_share(size)
        assert share is not None
        if not distance:
            return share
        own = _parts_of_backward(self.analytic, kind, micro_batch_size)
        other = _parts_of_backward(self._relative(series), kind, size)
        weights = share * own[0] / other[0]
        return weights / (weights + (1 - share) * own[1] / other[1])

    def _head_like_layer(self, kind: str, micro_batch_size: int) -> PassTimes:
        """The head does what layers do, so what makes their time differ is applied to it too."""
        if not layer_flops(self.model):
            return self._with_a_column._head_like_layer(kind, micro_batch_size)
        layer = self._times_of("layer", kind, micro_batch_size)
        expected = self.analytic.layer(kind, micro_batch_size)
        head = self.analytic.head(kind, micro_batch_size)
        return PassTimes(
            forward_s=head.forward_s * layer.forward_s / expected.forward_s,
            backward_s=head.backward_s * layer.backward_s / expected.backward_s,
        )

    @cached_property
    def _with_a_column(self) -> "ProfiledCompute":
        """Costs of a rank with one column of the MLP, for one that holds none of the layer."""
        return ProfiledCompute(
            self.profile,
            replace(self.model, ffn_hidden_size=self.tensor_parallel),
            dtype=self.dtype,
            kinds=self.kinds,
            tensor_parallel=self.tensor_parallel,
            computing=self.computing,
            whole=self.whole,
        )

    def _measured_step(self, kind: str) -> float | None:
        """Return seconds per parameter, or None where no step was measured.

        A step of another dtype counts by the bytes that it moves.
        """
        same = set(equal_kinds(kind, self.kinds))
        bytes_here = step_bytes_per_parameter(self.dtype)
        rates = [
            entry.update_s
            / entry.num_parameters
            * bytes_here
            / step_bytes_per_parameter(entry.dtype)
            for entry in self.profile.updates
            if entry.gpu_kind in same
        ]
        return median(rates) if rates else None

    def _closest(self, part: Part, kind: str) -> tuple[Series, float] | None:
        """The closest series and how unlike it is (0: the very thing), or None without any.

        Of series that are equally close the first one of the profile is taken.
        """
        if (part, kind) not in self._found:
            like = self.whole if part == "layer" else self.model
            # Where the whole was measured its parts still were not.
            more = 1.0 if like != self.model else 0.0
            candidates = (
                (series, self._distance(series, like, kind) + more)
                for series in self._candidates(part, like, kind)
            )
            self._found[part, kind] = min(candidates, key=itemgetter(1), default=None)
        return self._found[part, kind]

    def _candidates(self, part: Part, like: ModelShape, kind: str) -> Iterator[Series]:
        same_chip = set(equal_kinds(kind, self.kinds))
        models = {model.name: model for model in self.profile.models}
        for times in self.profile.times:
            if times.part != part or times.gpu_kind not in same_chip:
                continue
            if times.tensor_parallel not in (1, self.tensor_parallel):
                continue  # it has the collectives of other TP groups in it
            model = replace(models[times.model], seq_length=times.seq_length)
            series = Series(times, model)
            is_like = _is_like(series, part, like, self.tensor_parallel)
            if is_like and _is_same_rate(times.dtype, self.dtype):
                yield series

    def _distance(self, series: Series, like: ModelShape, kind: str) -> float:
        model, times = series.model, series.times
        factors = {
            # A rank of a TP group may hold none of the layer.
            1.0: model.layer_matrix_parameters() / max(1, like.layer_matrix_parameters()),
            _PER_SEQUENCE_FACTOR: model.seq_length / like.seq_length,
            _PER_PARALLEL_FACTOR: times.tensor_parallel / self.tensor_parallel,
        }
        distance = sum(weight * abs(math.log(factor)) for weight, factor in factors.items())
        distance += _OTHER_FAMILY * (model.is_gated != like.is_gated)
        distance += _OTHER_SHAPE * (_layer_shape(model) != _layer_shape(like))
        distance += _OTHER_DTYPE * (times.dtype != self.dtype)
        return distance + _OTHER_KIND * (times.gpu_kind != kind)

    def _relative(self, series: Series) -> AnalyticCompute:
        """Return the analytic times of what a series measured."""
        times = series.times
        key = f"{times.model} {times.seq_length} {times.tensor_parallel}"
        if key not in self._relatives:
            self._relatives[key] = self._analytic_for(series.model, times.tensor_parallel)
        return self._relatives[key]

    def _analytic_for(
        self, model: ModelShape, tensor_parallel: int, computing: Computing | None = None
    ) -> AnalyticCompute:
        """`computing`: None: as what was measured, without adapters."""
        return AnalyticCompute(
            model,
            dtype=self.dtype,
            kinds=self.kinds,
            tensor_parallel=tensor_parallel,
            computing=computing or replace(self.computing, lora=None),
        )
