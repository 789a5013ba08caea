"""Times from published figures, for GPUs without measurements: a roofline with fitted shares.

Williams et al. 2009 (roofline), with the sum of compute and memory time in place of their maximum:
in a layer the two are different kernels that run one after the other.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from zorse_megatron.costs.efficiency import (
    Shares,
    element_bytes,
    is_sixteen_bit,
    shares_of,
    traffic_of,
)
from zorse_megatron.costs.flops import (
    attention_flops,
    elementwise_bytes,
    head_flops,
    layer_flops,
    mask_bytes,
    matrix_flops,
    score_bytes,
)
from zorse_megatron.costs.interface import PassTimes, RecomputeMode
from zorse_megatron.costs.provenance import Provenance, off_by
from zorse_megatron.costs.same_chip import kinds_at_any_speed
from zorse_megatron.schema.gpus.gpu import Dtype, GpuKind
from zorse_megatron.schema.gpus.gpu_presets import GPU_KINDS
from zorse_megatron.schema.model.computing import USUAL, Computing
from zorse_megatron.schema.model.model_shape import ModelShape

# Nothing is faster than the CPU can launch it: about 20 kernels forward and 40 backward, 5 us each.
_LEAST_FORWARD_S, _LEAST_BACKWARD_S = 100e-6, 200e-6
# Share of the memory bandwidth that streaming kernels reach; Adam reaches it in Sailor's
# measurements: 28 bytes per parameter in 22.5 ps on an A100-40, in 37.3 ps on a V100.
_STREAMING = 0.8
# Logits: 16-bit out of the product, to float32, through softmax and loss; back again.
_LOGIT_PASSES_FORWARD, _LOGIT_PASSES_BACKWARD = 14.0, 10.0
# The table's gradient is made dense, and added to the accumulated one in float32.
_TABLE_GRADIENT_BYTES = 12.0


class AnalyticCompute:
    """`ComputeCost` from published figures; model, sequence length, dtype are fixed.

    `tensor_parallel`: the cost is that of one rank's part, without communication.
    """

    def __init__(
        self,
        model: ModelShape,
        *,
        dtype: Dtype,
        kinds: Mapping[str, GpuKind] = GPU_KINDS,
        tensor_parallel: int = 1,
        computing: Computing = USUAL,
    ) -> None:
        self.model = model
        self.computing = computing
        self.dtype: Dtype = dtype
        self.kinds = kinds
        self.tensor_parallel = tensor_parallel
        self._shares_of: dict[str, tuple[Shares, bool]] = {}

    def knows(self, kind: str) -> bool:
        """Whether the kind's figures are known for this dtype."""
        try:
            self._peak(kind)
        except LookupError:
            return False
        return True

    def provenance(self, kind: str) -> Provenance:
        """Say what the times of a kind rest on. Raises LookupError for an unknown kind."""
        source = self._gpu(kind).source
        _, is_fitted = self._shares(kind)
        efficiency = (
            "calibrated on this GPU" if is_fitted else "typical of GPUs, never measured here"
        )
        return Provenance(
            basis="analytic",
            detail=f"data-sheet peak x efficiency {efficiency} ({source})",
            off_by=off_by(
                "analytic", sixteen_bit=is_sixteen_bit(self.dtype), is_calibrated=is_fitted
            ),
            is_calibrated=is_fitted,
        )

    def layer(self, kind: str, micro_batch_size: float) -> PassTimes:
        """One transformer layer, nothing recomputed. Raises LookupError for an unknown kind."""
        model, ranks = self.model, self.tensor_parallel
        flops = micro_batch_size * layer_flops(model, ranks)
        moved = micro_batch_size * elementwise_bytes(model, element_bytes(self.dtype), ranks)
        peak, bandwidth = self._peak(kind), self._gpu(kind).memory_bytes_per_s
        shares, _ = self._shares(kind)
        there, back = traffic_of(self.dtype)
        weights = model.layer_parameters(ranks)
        forward_bytes = there.elementwise_passes * moved + there.bytes_per_parameter * weights
        backward_bytes = back.elementwise_passes * moved + back.bytes_per_parameter * weights
        more = self._beyond_usual(micro_batch_size)
        flops += more.flops
        forward_bytes += more.forward_bytes
        backward_bytes += more.backward_bytes
        return PassTimes(
            forward_s=max(
                _LEAST_FORWARD_S, flops / (peak * shares.forward) + forward_bytes / bandwidth
            ),
            backward_s=max(
                _LEAST_BACKWARD_S, 2 * flops / (peak * shares.backward) + backward_bytes / bandwidth
            ),
        )

    def embedding(self, kind: str, micro_batch_size: float) -> PassTimes:
        """Token (and position) embedding: memory traffic only."""
        model, width = self.model, element_bytes(self.dtype)
        rate = _STREAMING * self._gpu(kind).memory_bytes_per_s
        output = micro_batch_size * model.seq_length * model.hidden_size * width
        table = model.embedding_parameters(self.tensor_parallel)
        return PassTimes(
            forward_s=4 * output / rate,
            backward_s=(3 * output + _TABLE_GRADIENT_BYTES * table) / rate,
        )

    def head(self, kind: str, micro_batch_size: float) -> PassTimes:
        """Final norm, output layer and loss."""
        model, ranks = self.model, self.tensor_parallel
        flops = micro_batch_size * head_flops(model, ranks)
        logits = micro_batch_size * model.seq_length * (model.vocab_size // ranks)
        rate = _STREAMING * self._gpu(kind).memory_bytes_per_s
        shares, _ = self._shares(kind)
        there, back = traffic_of(self.dtype)
        table, peak = model.table_parameters(ranks), self._peak(kind)
        forward_bytes = _LOGIT_PASSES_FORWARD * logits + there.bytes_per_parameter * table
        backward_bytes = _LOGIT_PASSES_BACKWARD * logits + back.bytes_per_parameter * table
        return PassTimes(
            forward_s=flops / (peak * shares.forward) + forward_bytes / rate,
            backward_s=2 * flops / (peak * shares.backward) + backward_bytes / rate,
        )

    def recompute_s(self, kind: str, micro_batch_size: float, mode: RecomputeMode) -> float:
        """What recomputing one layer adds to its backward."""
        if mode == "none":
            return 0.0
        forward_s = self.layer(kind, micro_batch_size).forward_s
        return forward_s * (1.0 if mode == "full" else selective_share(self.model, self.computing))

    def weight_gradients_s(self, kind: str, micro_batch_size: float) -> float:
        """What gradients of its matrices take of one layer's backward: their products' time."""
        shares, _ = self._shares(kind)
        flops = micro_batch_size * matrix_flops(self.model, self.tensor_parallel)
        backward_s = self.layer(kind, micro_batch_size).backward_s
        return min(flops / (self._peak(kind) * shares.backward), backward_s / 2)

    def step_s(self, kind: str, num_parameters: int) -> float:
        """Adam on a shard: gradient, main parameter and moments in float32, read and written."""
        rate = _STREAMING * self._gpu(kind).memory_bytes_per_s
        return num_parameters * step_bytes_per_parameter(self.dtype) / rate

    def _beyond_usual(self, micro_batch_size: float) -> "_Roofline":
        """What unfused attention and dropout add: all scores, and their traffic."""
        flops = forward = backward = 0.0
        width, computing = element_bytes(self.dtype), self.computing
        if computing.attention == "unfused":
            flops = attention_flops(self.model, self.tensor_parallel)  # of the other half
            forward, backward = score_bytes(
                self.model,
                width,
                has_dropout=computing.attention_dropout,
                softmax_in_fp32=computing.softmax_in_fp32,
                tensor_parallel=self.tensor_parallel,
            )
        if computing.hidden_dropout:
            there, back = mask_bytes(self.model, width)
            forward, backward = forward + there, backward + back
        return _Roofline(
            flops=micro_batch_size * flops,
            forward_bytes=micro_batch_size * forward,
            backward_bytes=micro_batch_size * backward,
        )

    def _shares(self, kind: str) -> tuple[Shares, bool]:
        if kind not in self._shares_of:
            self._shares_of[kind] = shares_of(kinds_at_any_speed(kind, self.kinds), self.dtype)
        return self._shares_of[kind]

    def _gpu(self, kind: str) -> GpuKind:
        try:
            return self.kinds[kind]
        except KeyError:
            known = ", ".join(self.kinds)
            raise LookupError(
                f"found no figures for GPU kind {kind}; expected one of {known}. Describe it "
                "under gpu_kinds of the cluster file, or give a profile that has it."
            ) from None

    def _peak(self, kind: str) -> float:
        try:
            return self._gpu(kind).peak.of(self.dtype)
        except LookupError as error:
            if kind not in self.kinds:
                raise
            raise LookupError(
                f"GPU kind {kind} has no hardware support for {self.dtype}; expected a supported "
                "dtype. Train in another dtype, omit this kind, or give a profile that has it."
            ) from error


def selective_share(model: ModelShape, computing: Computing) -> float:
    """Return the share of a layer's operations that selective recomputation does again.

    Unfused attention computes all scores; norms count nothing.
    """
    attention = attention_flops(model)
    total = layer_flops(model)
    if computing.attention == "unfused":
        total, attention = total + attention, 2 * attention
    mlp = (
        2.0 * model.seq_length * model.hidden_size * (model.ffn_input_width + model.ffn_hidden_size)
    )
    shares = {"core_attn": attention, "mlp": mlp, "layernorm": 0.0}
    # Of a rank that holds none of the layer there is nothing to do again.
    return sum(shares[module] for module in computing.modules) / total if total else 0.0


@dataclass(frozen=True, kw_only=True)
class _Roofline:
    """Operations of a forward, and traffic of both passes."""

    flops: float
    forward_bytes: float
    backward_bytes: float


def step_bytes_per_parameter(dtype: Dtype) -> float:
    """Return the traffic of Adam: reads gradient, main parameter and two moments, writes three.

    With 16-bit parameters the result is written once more, and gradients are read for their norm.
    """
    return 28.0 + (6.0 if is_sixteen_bit(dtype) else 0.0)
