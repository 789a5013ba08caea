"""Times from published figures, for GPUs without measurements: a roofline with fitted shares.

Williams et al. 2009 (roofline), with the sum of compute and memory time in place of their maximum:
in a layer the two are different kernels that run one after the other.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from zorse_megatron.costs.interface import PassTimes, Provenance, off_by
from zorse_megatron.costs.own_speeds import kinds_at_any_speed
from zorse_megatron.gpus.gpu import PRODUCTS_IN_TRITON_FROM, Dtype, GpuKind
from zorse_megatron.gpus.known_gpus import GPU_KINDS
from zorse_megatron.inputs.model import USUAL, Computing, ModelShape

# Fraction of their published peak that GPUs reach in transformer layers.
#
# A layer's pass takes operations / (peak x share) + bytes / memory bandwidth. The shares below
# were fitted to the layer times that the authors of Zorse published (MLSys 2026, MIT licence; sums
# of kernel times of Llama and GPT layers, PyTorch without fused element-wise kernels), least mean
# relative error by kind of GPU, type of number and pass. The traffic factors were fitted to all of
# them together. What is left of the error is in docs/simulator.md. A share above 1 says that
# the GPU clocks higher than its data sheet assumes.


@dataclass(frozen=True, kw_only=True)
class Shares:
    """Shares of the peak rate of matrix products."""

    forward: float
    backward: float


@dataclass(frozen=True, kw_only=True)
class LayerTraffic:
    """Memory traffic of one pass."""

    elementwise_passes: float
    """Multiples of what fused kernels would move (`costs.analytic_compute.elementwise_bytes`)."""
    bytes_per_parameter: float
    """Traffic per weight at any micro-batch size: read it; read, add and write its gradient."""


def _table(rows: dict[str, tuple[float, float]]) -> dict[str, Shares]:
    return {kind: Shares(forward=f, backward=b) for kind, (f, b) in rows.items()}


_SIXTEEN_BIT = _table(
    {
        "H100-NVL": (0.53, 0.46),
        "A100-80": (0.88, 0.82),
        "A100-40": (0.92, 0.84),
        "A10G": (1.06, 0.97),
        "A6000": (1.03, 0.86),
        "L4": (0.88, 0.55),
        "V100-16": (0.80, 0.75),
        "V100-PCIE-16": (0.77, 0.77),
        "T4": (0.52, 0.40),
        "P100": (0.39, 0.41),
        "P40": (0.58, 0.70),
        "W6800": (0.40, 0.56),
    }
)
_FLOAT32 = _table(
    {
        "H100-NVL": (0.71, 0.73),
        "A100-40": (0.98, 0.97),
        "A10G": (0.58, 0.70),
        "A6000": (0.52, 0.64),
        "L40S": (0.44, 0.55),
        "L4": (0.31, 0.39),
        "V100-16": (0.97, 0.94),
        "V100-PCIE-16": (1.00, 0.97),
        "T4": (0.56, 0.55),
        "P100": (0.84, 0.84),
        "P40": (0.73, 0.77),
    }
)
# Kinds with the same chip as a fitted one, or one of its family, but other figures.
_SAME_FAMILY = {
    "H200": "H100-NVL",
    "GH200-96": "H100-NVL",
    "H100-80": "H100-NVL",
    "H100-PCIE-80": "H100-NVL",
    "A100-PCIE-80": "A100-80",
    "A40": "A6000",
    "RTX6000-Ada": "L40S",
    "RTX3090": "A6000",
    "RTX3080": "A6000",
    "RTX3080Ti": "A6000",
    "A5000": "A6000",
    "A4500": "A6000",
}
# Where nothing was fitted: about the median of the table.
_USUAL = Shares(forward=0.70, backward=0.65)

_TRAFFIC: dict[bool, tuple[LayerTraffic, LayerTraffic]] = {
    True: (
        LayerTraffic(elementwise_passes=7.5, bytes_per_parameter=2.0),
        LayerTraffic(elementwise_passes=13.5, bytes_per_parameter=22.0),
    ),
    False: (
        LayerTraffic(elementwise_passes=7.5, bytes_per_parameter=4.0),
        LayerTraffic(elementwise_passes=13.5, bytes_per_parameter=16.0),
    ),
}


def shares_of(names: Iterable[str], dtype: Dtype) -> tuple[Shares, bool]:
    """Return the shares of a kind, and whether they were fitted to it or to its chip.

    `names` are that of the kind and those of kinds with the same figures.
    """
    table = _SIXTEEN_BIT if is_sixteen_bit(dtype) else _FLOAT32
    if dtype != "tf32":  # nothing public is measured on tensor cores in tf32
        for name in names:
            fitted = table.get(name) or table.get(_SAME_FAMILY.get(name, ""))
            if fitted is not None:
                return fitted, True
    return _USUAL, False


def traffic_of(dtype: Dtype) -> tuple[LayerTraffic, LayerTraffic]:
    """Return the traffic of forward and backward."""
    return _TRAFFIC[is_sixteen_bit(dtype)]


def is_sixteen_bit(dtype: Dtype) -> bool:
    """Whether a number takes two bytes."""
    return dtype in ("float16", "bfloat16")


def element_bytes(dtype: Dtype) -> int:
    """Return the bytes of one number."""
    return 2 if is_sixteen_bit(dtype) else 4


# Nothing is faster than the CPU can launch it: about 20 kernels forward and 40 backward, 5 us each.
_LEAST_FORWARD_S, _LEAST_BACKWARD_S = 100e-6, 200e-6
# An adapter adds three forward (two products, and the sum with the matrix's result) and five
# backward (gradients of both factors of each product, and the sum with the input's gradient).
_LEAST_ADAPTER_FORWARD_S, _LEAST_ADAPTER_BACKWARD_S = 15e-6, 25e-6
# Share of the memory bandwidth that streaming kernels reach; Adam reaches it in Sailor's
# measurements: 28 bytes per parameter in 22.5 ps on an A100-40, in 37.3 ps on a V100.
_STREAMING = 0.8
_FLOAT32_BYTES = 4
# Of experts: forward, the row of each token and expert is sorted by expert, and sorted back, a read
# and a write each, and added to its token: a read, and at most a write. Backward the same from the
# other end.
_ROW_PASSES = 6
# Of each expert for each token: its score and whether it is chosen are written, read, scattered and
# transposed, and its place is sorted with a position of 8 bytes: 2 x (4 x 4 + 2 x 8).
_SCORE_BYTES = 64
# Of each expert where they are a loop (`PRODUCTS_IN_TRITON_FROM`), else of all: two products and an
# activation forward; backward the activation, and of each matrix the gradients of its input and of
# its weight, and the sum with those of before.
_LEAST_EXPERT_FORWARD_S, _LEAST_EXPERT_BACKWARD_S = 15e-6, 35e-6
# Logits: 16-bit out of the product, to float32, through softmax and loss; back again.
_LOGIT_PASSES_FORWARD, _LOGIT_PASSES_BACKWARD = 14.0, 10.0
# The table's gradient is made dense, and added to the accumulated one in float32.
_TABLE_GRADIENT_BYTES = 12.0


class AnalyticCompute:
    """Times from published figures; model, sequence length, dtype are fixed.

    `tensor_parallel`: the cost is that of one rank's part, without communication. With adapters
    (`computing.lora`) it is theirs, too, and no other weights have gradients.
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

    def provenance(self, kind: str) -> Provenance:
        """Say what the times of a kind rest on. Raises LookupError for an unknown kind."""
        source = self._gpu(kind).source
        _, is_fitted = self._shares(kind)
        efficiency = (
            "calibrated on this GPU" if is_fitted else "typical of GPUs, never measured here"
        )
        has_experts = self.model.experts is not None
        efficiency += ", of layers without experts" * has_experts
        return Provenance(
            basis="analytic",
            detail=f"data-sheet peak x efficiency {efficiency} ({source})",
            off_by=off_by(
                "analytic",
                sixteen_bit=is_sixteen_bit(self.dtype),
                is_calibrated=is_fitted and not has_experts,
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
        weights = model.layer_parameters(ranks) - model.expert_parameters
        forward_bytes = there.elementwise_passes * moved + there.bytes_per_parameter * weights
        backward_bytes = back.elementwise_passes * moved + back.bytes_per_parameter * weights
        adapters = self._adapters(micro_batch_size)
        experts = self._experts(kind, micro_batch_size)
        for more in (self._beyond_usual(micro_batch_size), adapters, experts):
            flops += more.flops
            forward_bytes += more.forward_bytes
            backward_bytes += more.backward_bytes
        back_flops = 2 * flops - adapters.spared_flops
        return PassTimes(
            forward_s=max(
                _LEAST_FORWARD_S
                + adapters.number * _LEAST_ADAPTER_FORWARD_S
                + experts.number * _LEAST_EXPERT_FORWARD_S,
                flops / (peak * shares.forward) + forward_bytes / bandwidth,
            ),
            backward_s=max(
                _LEAST_BACKWARD_S
                + adapters.number * _LEAST_ADAPTER_BACKWARD_S
                + experts.number * _LEAST_EXPERT_BACKWARD_S,
                back_flops / (peak * shares.backward) + backward_bytes / bandwidth,
            ),
        )

    def embedding(self, kind: str, micro_batch_size: float) -> PassTimes:
        """Token (and position) embedding: memory traffic only."""
        model, width = self.model, element_bytes(self.dtype)
        rate = _STREAMING * self._gpu(kind).memory_bytes_per_s
        output = micro_batch_size * model.seq_length * model.hidden_size * width
        table = model.embedding_parameters(self.tensor_parallel)
        is_frozen = self.computing.lora is not None
        return PassTimes(
            forward_s=4 * output / rate,
            backward_s=0.0 if is_frozen else (3 * output + _TABLE_GRADIENT_BYTES * table) / rate,
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
        products, moved = (2, back) if self.computing.lora is None else (1, there)
        backward_bytes = _LOGIT_PASSES_BACKWARD * logits + moved.bytes_per_parameter * table
        return PassTimes(
            forward_s=flops / (peak * shares.forward) + forward_bytes / rate,
            backward_s=products * flops / (peak * shares.backward) + backward_bytes / rate,
        )

    def weight_gradients_s(self, kind: str, micro_batch_size: float) -> float:
        """What gradients of its matrices take of one layer's backward: their products' time, and
        of experts what adds them up.

        Nothing with adapters, whose few stay in the backward.
        """
        if self.computing.lora is not None:
            return 0.0
        shares, _ = self._shares(kind)
        flops = micro_batch_size * matrix_flops(self.model, self.tensor_parallel)
        backward_s = self.layer(kind, micro_batch_size).backward_s
        products_s = min(flops / (self._peak(kind) * shares.backward), backward_s / 2)
        return products_s + self._expert_gradient_bytes / self._gpu(kind).memory_bytes_per_s

    def step_s(self, kind: str, num_parameters: int) -> float:
        """Adam on a shard: gradient, main parameter and moments in float32, read and written."""
        rate = _STREAMING * self._gpu(kind).memory_bytes_per_s
        return num_parameters * step_bytes_per_parameter(self.dtype) / rate

    def _beyond_usual(self, micro_batch_size: float) -> "_Added":
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
        return _Added(
            flops=micro_batch_size * flops,
            forward_bytes=micro_batch_size * forward,
            backward_bytes=micro_batch_size * backward,
        )

    def _adapters(self, micro_batch_size: float) -> "_Added":
        """What adapters add, and what weights spare that have no gradients.

        Forward an adapter reads its input, writes its result, and adds that to the matrix's;
        backward it reads the gradient of its result twice, and its input; it writes a gradient of
        the input, and adds that to the matrix's. Beside a fused matrix results are put together
        first, and their gradients taken apart.
        """
        lora, model, ranks = self.computing.lora, self.model, self.tensor_parallel
        if lora is None:
            return _Added()
        there, back = (each.bytes_per_parameter for each in traffic_of(self.dtype))
        parameters = lora.layer_parameters(model, ranks)
        weights = model.layer_parameters(ranks) - model.expert_parameters
        tokens, forward, backward = micro_batch_size * model.seq_length, 0.0, 0.0
        for size in lora.sizes(model).values():
            inputs = size.inputs / (1 if size.cuts_outputs else ranks)
            outputs = size.outputs / (ranks if size.cuts_outputs else 1)
            copies = 2 * outputs * size.cuts_outputs
            forward += inputs + 4 * outputs + copies
            backward += 5 * inputs + 2 * outputs + copies
        moved = tokens * element_bytes(self.dtype)
        return _Added(
            flops=2.0 * tokens * parameters,
            forward_bytes=moved * forward + there * parameters,
            backward_bytes=moved * backward + back * parameters - (back - there) * weights,
            number=len(lora.sizes(model)),
            spared_flops=micro_batch_size * matrix_flops(model, ranks),
        )

    def _experts(self, kind: str, micro_batch_size: float) -> "_Added":
        """What experts add to the operations of those that tokens pass: traffic.

        Each micro-batch passes all experts of a layer: it reads every weight forward and backward,
        and adds to every gradient, whatever its size. So time over micro-batch size has an
        intercept. Rows are sorted, and experts computed, as a plan's layers do
        (`adapter.model.expert_layers`).

        Routing is taken to be even: an expert's products are of tokens x experts per token /
        experts. With few tokens they are as slow as their traffic, with many as their operations,
        at the rate of dense layers. The two are added, as everywhere in these costs: a product's
        tiles cannot hide the weights that they wait for first, and gradients are added up by
        kernels of their own. At most that is twice the maximum of the two, where both are equal.
        """
        model, experts = self.model, self.model.experts
        if experts is None:
            return _Added()
        capability, width = self._gpu(kind).capability, element_bytes(self.dtype)
        are_together = capability is None or capability >= PRODUCTS_IN_TRITON_FROM
        row_bytes = experts.per_token * model.hidden_size * width * _ROW_PASSES
        tokens = micro_batch_size * model.seq_length
        routed = tokens * (row_bytes + _SCORE_BYTES * experts.num_experts)
        forward = float(width * model.expert_parameters) + routed
        return _Added(
            forward_bytes=forward,
            backward_bytes=forward + self._expert_gradient_bytes,
            number=1 if are_together else experts.num_held,
        )

    @property
    def _expert_gradient_bytes(self) -> float:
        """Of experts, read and written once where gradients of weights are added up."""
        if self.computing.lora is not None:
            return 0.0
        is_narrow = self.computing.narrow_gradients
        accumulated = element_bytes(self.dtype) if is_narrow else _FLOAT32_BYTES
        return 2.0 * accumulated * self.model.expert_parameters

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
        """The chip's rate; where it has no units for the type, as planners ask before, that of
        float32: what was measured in such a type still is in proportion to what it computes."""
        peak = self._gpu(kind).peak
        try:
            return peak.of(self.dtype)
        except LookupError:
            return peak.of("float32")


def selective_share(model: ModelShape, computing: Computing) -> float:
    """Return the share of a layer's operations that selective recomputation does again.

    Unfused attention computes all scores; norms count nothing.
    """
    attention = attention_flops(model)
    total = layer_flops(model)
    if computing.attention == "unfused":
        total, attention = total + attention, 2 * attention
    mlp = 2.0 * model.seq_length * model.hidden_size * (model.ffn_input_width + model.ffn_width)
    if model.experts is not None:
        mlp = 0.0  # Megatron's is that of dense layers
    shares = {"core_attn": attention, "mlp": mlp, "layernorm": 0.0}
    # Of a rank that holds none of the layer there is nothing to do again.
    return sum(shares[module] for module in computing.modules) / total if total else 0.0


@dataclass(frozen=True, kw_only=True)
class _Added:
    """What adapters, experts, dropout or unfused attention add to a layer."""

    flops: float = 0.0
    """Of a forward."""
    forward_bytes: float = 0.0
    backward_bytes: float = 0.0
    number: int = 0
    """Of adapters or experts, each with kernels of its own."""
    spared_flops: float = 0.0
    """Of a backward."""


def step_bytes_per_parameter(dtype: Dtype) -> float:
    """Return the traffic of Adam: reads gradient, main parameter and two moments, writes three.

    With 16-bit parameters the result is written once more, and gradients are read for their norm.
    """
    return 28.0 + (6.0 if is_sixteen_bit(dtype) else 0.0)


# Floating-point operations and memory traffic of the parts of a model, for one sample.
#
# A multiply-add counts as two operations; a backward pass has twice the operations of its forward
# (Kaplan et al. 2020, arXiv 2001.08361; Korthikanti et al. 2022, arXiv 2205.05198). Attention
# scores are counted for the causal half only: flash kernels skip the other one.


def attention_flops(shape: ModelShape, tensor_parallel: int = 1) -> float:
    """Scores and their product with the values, forward, one layer."""
    pairs = shape.seq_length * shape.seq_length / 2
    return 2.0 * pairs * (shape.query_width + shape.context_width) / tensor_parallel


def matrix_flops(shape: ModelShape, tensor_parallel: int = 1) -> float:
    """Products with the matrices of one layer, forward; gradients of the matrices take as many."""
    return 2.0 * shape.seq_length * shape.layer_matrix_parameters(tensor_parallel)


def layer_flops(shape: ModelShape, tensor_parallel: int = 1) -> float:
    """Forward of one transformer layer on each rank."""
    return matrix_flops(shape, tensor_parallel) + attention_flops(shape, tensor_parallel)


def head_flops(shape: ModelShape, tensor_parallel: int = 1) -> float:
    """Forward of the output layer on each rank."""
    return 2.0 * shape.seq_length * shape.table_parameters(tensor_parallel)


def elementwise_bytes(shape: ModelShape, element_bytes: int, tensor_parallel: int = 1) -> float:
    """What norms, residuals, activation and rotary embedding of one layer read and write, forward.

    Counted as fused kernels do it: two norms and two residual sums of width hidden (a read and a
    write, or two reads and a write, each), query and key once through the rotary embedding, the
    feed-forward activation in and out. The narrow vectors of latent attention are normalized.
    """
    ranks = 0 if shape.latent is None else shape.latent.ranks
    whole = (2 * 2 + 2 * 3) * shape.hidden_size + 2 * ranks * shape.qk_norm
    rotary = 2 * (shape.query_width + shape.key_width)
    activation = shape.ffn_input_width + shape.ffn_width
    if shape.experts is not None:  # rows of all of them are on every rank
        activation *= tensor_parallel
    per_token = whole + (rotary + activation) / tensor_parallel
    return float(shape.seq_length * per_token * element_bytes)


def score_bytes(
    shape: ModelShape,
    element_bytes: int,
    *,
    has_dropout: bool,
    softmax_in_fp32: bool = False,
    tensor_parallel: int = 1,
) -> tuple[float, float]:
    """What unfused attention of one layer moves beyond flash attention, forward and backward.

    Forward the scores are written, read and written by the softmax and read by the product with
    the values; backward their gradient is written, read with the softmax and written, read twice,
    and the probabilities are read. Dropout reads and writes them once more, with a mask of a byte.

    A softmax that is not one kernel with its mask, and in fp32, is a row of them: 16 bits to fp32,
    mask, softmax, and back to 16 bits; and the same from the other end.
    """
    elements = shape.num_attention_heads * shape.seq_length**2 / tensor_parallel
    again = 2 * element_bytes + 1 if has_dropout else 0
    forward, backward = 4 * element_bytes + again, 7 * element_bytes + again
    if softmax_in_fp32 and element_bytes < _FLOAT32_BYTES:
        convert, rewrite = element_bytes + _FLOAT32_BYTES, 2 * _FLOAT32_BYTES
        forward += 2 * convert + 2 * rewrite - 2 * element_bytes
        backward += 2 * convert + 2 * rewrite + _FLOAT32_BYTES - 3 * element_bytes
    return elements * forward, elements * backward


def mask_bytes(shape: ModelShape, element_bytes: int) -> tuple[float, float]:
    """What dropout after both blocks of a layer moves, fused with the residual sum.

    Forward a mask is written; backward it is read, and a gradient read and written.
    """
    elements = 2.0 * shape.seq_length * shape.hidden_size
    return elements, elements * (2 * element_bytes + 1)
