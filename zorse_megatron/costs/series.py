"""Select the measured times for a model on a kind of GPU: its own, or the closest."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from zorse_megatron.costs.curve import Curve, Replaced, fit_curve
from zorse_megatron.costs.efficiency import is_sixteen_bit
from zorse_megatron.costs.same_chip import equal_kinds
from zorse_megatron.schema.gpus.gpu import Dtype, GpuKind
from zorse_megatron.schema.model.model_shape import ModelShape
from zorse_megatron.schema.profile.profile import Part, Profile, Times

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

    def replaced(self) -> dict[str, tuple[Replaced, ...]]:
        """Return the points that the curves do not pass through."""
        sizes = self.times.micro_batch_sizes
        return {
            "forward": fit_curve(sizes, self.times.forward_s)[1],
            "backward": fit_curve(sizes, self.times.backward_s)[1],
        }


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What costs are wanted for."""

    part: Part
    model: ModelShape
    gpu_kind: str
    dtype: Dtype
    tensor_parallel: int


def closest(
    profile: Profile, wanted: Wanted, kinds: Mapping[str, GpuKind]
) -> tuple[Series, float] | None:
    """Return the closest series and how unlike it is (0: the very thing), or None without any.

    Of series that are equally close the first one of the profile is taken.
    """
    best: tuple[Series, float] | None = None
    for series in _candidates(profile, wanted, kinds):
        distance = _distance(series, wanted)
        if best is None or distance < best[1]:
            best = series, distance
    return best


def _candidates(profile: Profile, wanted: Wanted, kinds: Mapping[str, GpuKind]) -> Iterator[Series]:
    same_chip = set(equal_kinds(wanted.gpu_kind, kinds))
    models = {model.name: model.shape() for model in profile.models}
    for times in profile.times:
        if times.part == wanted.part and times.gpu_kind in same_chip and _same_rate(times, wanted):
            model = replace(models[times.model], seq_length=times.seq_length)
            if times.tensor_parallel not in (1, wanted.tensor_parallel):
                continue  # it has the collectives of other sets in it
            if times.part == "layer" or _same_ends(model, wanted, times):
                yield Series(times, model)


def _same_rate(times: Times, wanted: Wanted) -> bool:
    """float16 and bfloat16 answer for each other; both run at one rate where both exist."""
    both_short = is_sixteen_bit(times.dtype) and is_sixteen_bit(wanted.dtype)
    return times.dtype == wanted.dtype or both_short


def _same_ends(model: ModelShape, wanted: Wanted, times: Times) -> bool:
    """Embedding and head answer only for the same table and the same split."""
    own = (model.hidden_size, model.vocab_size, model.seq_length, times.tensor_parallel)
    other = wanted.model
    asked = (other.hidden_size, other.vocab_size, other.seq_length, wanted.tensor_parallel)
    return own == asked


def _distance(series: Series, wanted: Wanted) -> float:
    model, other = series.model, wanted.model
    factors = {
        # A rank of a set may hold none of the layer.
        1.0: model.layer_matrix_parameters() / max(1, other.layer_matrix_parameters()),
        _PER_SEQUENCE_FACTOR: model.seq_length / other.seq_length,
        _PER_PARALLEL_FACTOR: series.times.tensor_parallel / wanted.tensor_parallel,
    }
    distance = sum(weight * abs(math.log(factor)) for weight, factor in factors.items())
    distance += _OTHER_FAMILY * (model.is_gated != other.is_gated)
    distance += _OTHER_SHAPE * (_layer_shape(model) != _layer_shape(other))
    distance += _OTHER_DTYPE * (series.times.dtype != wanted.dtype)
    return distance + _OTHER_KIND * (series.times.gpu_kind != wanted.gpu_kind)


def _layer_shape(model: ModelShape) -> tuple[object, ...]:
    heads = (model.num_attention_heads, model.num_query_groups, model.kv_channels)
    return (model.hidden_size, model.ffn_hidden_size, model.activation, *heads)
