"""Unequal parts of a tensor-parallel set, told to Megatron as sizes that it divides equally.

Megatron's layers divide numbers of heads, groups, columns and rows by the ranks of the set. A rank
that holds n of them is told n times the number of ranks, so that all of its own divisions, in its
layers and in Transformer Engine's, come to n. What is left are the rows of the vocabulary, of which
a rank must know the first one: stock takes it that all ranks before have as many.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from zorse_megatron.adapter.groups.global_groups import presented
from zorse_megatron.runtime.set_place import SetPlace


class LocalSizes:
    """What one rank's model config says, and what the model is."""

    def __init__(self, model_config: Any, place: SetPlace) -> None:
        """`model_config`: the script's (`cfg_container.model`), as for the whole model."""
        self.config, self.place = model_config, place
        transformer = model_config.transformer
        groups = transformer.num_query_groups
        heads = transformer.num_attention_heads // groups
        local_groups = self._told("kv_groups", groups)
        self._transformer: dict[str, Any] = {
            "num_query_groups": local_groups,
            "num_attention_heads": local_groups * heads,
            "ffn_hidden_size": self._told("mlp_columns", transformer.ffn_hidden_size),
        }
        if not self._transformer["ffn_hidden_size"]:
            # Fused activations cannot reshape what has no columns, and have nothing to do.
            self._transformer["bias_activation_fusion"] = False
        self._vocab_size = self._told("vocabulary_rows", model_config.vocab_size)

    def _told(self, kind: Any, whole: int) -> int:
        start, stop = self.place.parts.interval(kind, self.place.index, whole)
        return (stop - start) * self.place.degree

    def show(self) -> None:
        """Let the config say, from now on, this rank's sizes."""
        self._whole = {name: getattr(self.config.transformer, name) for name in self._transformer}
        self._whole_vocab_size = self.config.vocab_size
        for name, value in self._transformer.items():
            setattr(self.config.transformer, name, value)
        self.config.vocab_size = self._vocab_size

    def whole(self) -> AbstractContextManager[Any]:
        """Within the block, the config says the sizes of the whole model."""
        stack = ExitStack()
        for name, value in self._whole.items():
            stack.enter_context(presented(self.config.transformer, name, value))
        stack.enter_context(presented(self.config, "vocab_size", self._whole_vocab_size))
        return stack


def with_own_rows(place: SetPlace, stock: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `VocabUtility.vocab_range_from_per_partition_vocab_size`, for a rank of a set."""
    ends = place.parts.counts("vocabulary_rows")

    def vocab_range_from_per_partition_vocab_size(
        per_partition_vocab_size: int, rank: int, world_size: int
    ) -> Any:
        if world_size != place.degree:  # the whole model is built on one rank
            return stock(per_partition_vocab_size, rank, world_size)
        start = sum(ends[:rank])
        return start, start + per_partition_vocab_size

    return vocab_range_from_per_partition_vocab_size
