"""Memory traffic of experts, beside the operations of those that a token passes.

Each micro-batch passes all experts of a layer: it reads every weight forward and backward, and adds
to every gradient, whatever its size. So time over micro-batch size has an intercept.

Routing is taken to be even: an expert's products are of tokens x experts per token / experts. With
few tokens they are as slow as their traffic, with many as their operations, at the rate of dense
layers. The two are added, as everywhere in these costs: a product's tiles cannot hide the weights
that they wait for first, and gradients are added up by kernels of their own. At most that is twice
the maximum of the two, where both are equal.

Megatron's alltoall dispatcher without fused kernels, and one expert after the other.
"""

from dataclasses import dataclass

from zorse_megatron.inputs.model import ModelShape

_FLOAT32_BYTES = 4
# Forward, each row of a token and an expert is gathered, sorted by expert, joined with those of
# other experts, sorted back and added to its token: a read and a write each. Backward the same from
# the other end.
_ROW_PASSES = 10
# Of each expert for each token: its score and whether it is chosen are written, read, scattered and
# transposed, and its place is sorted with a position of 8 bytes: 2 x (4 x 4 + 2 x 8).
_SCORE_BYTES = 64
# A loop over experts launches two products and an activation forward; backward the activation, and
# of each matrix the gradients of its input and of its weight, and the sum with those of before.
LEAST_FORWARD_S, LEAST_BACKWARD_S = 15e-6, 35e-6


@dataclass(frozen=True, kw_only=True)
class ExpertTraffic:
    """Bytes of one layer and micro-batch; none of a layer without experts."""

    weight_bytes: float
    """Of all experts, read once in each pass."""
    gradient_bytes: float
    """Read and written once where gradients of weights are added up."""
    row_bytes: float
    """Of what is routed, in each pass."""


def expert_traffic(
    model: ModelShape, samples: float, *, element_bytes: int, narrow_gradients: bool
) -> ExpertTraffic:
    """Return it. `narrow_gradients`: whether they are accumulated as wide as they are computed."""
    experts = model.experts
    if experts is None:
        return ExpertTraffic(weight_bytes=0.0, gradient_bytes=0.0, row_bytes=0.0)
    rows = experts.per_token * model.hidden_size * element_bytes * _ROW_PASSES
    accumulated = element_bytes if narrow_gradients else _FLOAT32_BYTES
    tokens = samples * model.seq_length
    return ExpertTraffic(
        weight_bytes=float(element_bytes * model.expert_parameters),
        gradient_bytes=2.0 * accumulated * model.expert_parameters,
        row_bytes=tokens * (rows + _SCORE_BYTES * experts.num_experts),
    )
