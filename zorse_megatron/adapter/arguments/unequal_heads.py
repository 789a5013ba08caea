"""Numbers of heads that the ranks of a tensor-parallel set do not divide."""

from collections.abc import Callable
from typing import Any


def with_any_heads(stock: Callable[[Any], None]) -> Callable[[Any], None]:
    """Wrap `TransformerConfig.__post_init__`, which the whole model's heads need not pass."""

    def post_init(self: Any) -> None:
        degree, heads = self.tensor_model_parallel_size, self.num_attention_heads
        groups = self.num_query_groups or heads
        if self.kv_channels is None:
            self.kv_channels = self.hidden_size // heads
        self.num_attention_heads, self.num_query_groups = heads * degree, groups * degree
        try:
            stock(self)
        finally:
            self.num_attention_heads, self.num_query_groups = heads, groups

    return post_init
