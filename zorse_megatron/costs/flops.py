"""Floating-point operations and memory traffic of the parts of a model, for one sample.

A multiply-add counts as two operations; a backward pass has twice the operations of its forward
(Kaplan et al. 2020, arXiv 2001.08361; Korthikanti et al. 2022, arXiv 2205.05198). Attention scores
are counted for the causal half only: flash kernels skip the other one.
"""

from zorse_megatron.schema.model import ModelShape


def attention_flops(shape: ModelShape, tensor_parallel: int = 1) -> float:
    """Scores and their product with the values, forward, one layer."""
    pairs = shape.seq_length * shape.seq_length / 2
    return 4.0 * pairs * shape.query_width / tensor_parallel


def layer_flops(shape: ModelShape, tensor_parallel: int = 1) -> float:
    """Forward of one transformer layer on each rank."""
    matrices = 2.0 * shape.seq_length * shape.layer_matrix_parameters(tensor_parallel)
    return matrices + attention_flops(shape, tensor_parallel)


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
