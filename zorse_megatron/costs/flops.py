"""Floating-point operations and memory traffic of the parts of a model, for one sample.

A multiply-add counts as two operations; a backward pass has twice the operations of its forward
(Kaplan et al. 2020, arXiv 2001.08361; Korthikanti et al. 2022, arXiv 2205.05198). Attention scores
are counted for the causal half only: flash kernels skip the other one.
"""

from zorse_megatron.schema.model.model_shape import ModelShape

_FLOAT32_BYTES = 4


def attention_flops(shape: ModelShape, tensor_parallel: int = 1) -> float:
    """Scores and their product with the values, forward, one layer."""
    pairs = shape.seq_length * shape.seq_length / 2
    return 4.0 * pairs * shape.query_width / tensor_parallel


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
    feed-forward activation in and out.
    """
    whole = (2 * 2 + 2 * 3) * shape.hidden_size
    rotary = 2 * (shape.query_width + shape.key_value_width // 2)
    activation = shape.ffn_input_width + shape.ffn_hidden_size
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
