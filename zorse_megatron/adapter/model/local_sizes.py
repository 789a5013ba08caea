"""Unequal parts of a tensor-parallel set, told to Megatron as sizes that it divides equally.

Megatron's layers divide numbers of heads, groups, columns and rows by the ranks of the set. A rank
that holds n of them is told n times the number of ranks, so that all of its own divisions, in its
layers and in Transformer Engine's, come to n. What is left are the rows of the vocabulary, of which
a rank must know the first one: stock takes it that all ranks before have as many.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any

from zorse_megatron.adapter.checkpoint.saved_parameters import saved_as_nothing
from zorse_megatron.adapter.groups.global_groups import presented
from zorse_megatron.adapter.model.without_heads import layer_spec_without_heads
from zorse_megatron.adapter.model.without_rows import looking_up_nothing, without_a_logit
from zorse_megatron.adapter.patches import under_plan
from zorse_megatron.adapter.patches.rebind import Make, Rebinding, Replacements
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
        layer_spec = model_config.transformer_layer_spec
        if not local_groups:  # a number that stock divides by: it is told one group per rank
            local_groups = place.degree
            layer_spec = layer_spec_without_heads(layer_spec)
        self._transformer: dict[str, Any] = {
            "num_query_groups": local_groups,
            "num_attention_heads": local_groups * heads,
            "ffn_hidden_size": self._told("mlp_columns", transformer.ffn_hidden_size),
            # They get a single process's weights; stock cannot initialise none on the CPU.
            "perform_initialization": False,
        }
        if not self._transformer["ffn_hidden_size"]:
            # Fused activations cannot reshape what has no columns, and have nothing to do.
            self._transformer["bias_activation_fusion"] = False
        self._model = {
            "vocab_size": self._told("vocabulary_rows", model_config.vocab_size),
            "transformer_layer_spec": layer_spec,
        }

    def _told(self, kind: Any, whole: int) -> int:
        start, stop = self.place.parts.interval(kind, self.place.index, whole)
        return (stop - start) * self.place.degree

    def show(self) -> None:
        """Let the config say, from now on, this rank's sizes."""
        self._whole = []
        for config, sizes in self._told_sizes():
            self._whole.append((config, {name: getattr(config, name) for name in sizes}))
            for name, value in sizes.items():
                setattr(config, name, value)

    def whole(self) -> AbstractContextManager[Any]:
        """Within the block, the config says the sizes of the whole model."""
        stack = ExitStack()
        for config, sizes in self._whole:
            for name, value in sizes.items():
                stack.enter_context(presented(config, name, value))
        return stack

    def _told_sizes(self) -> list[tuple[Any, dict[str, Any]]]:
        return [(self.config.transformer, self._transformer), (self.config, self._model)]


def size_hooks(place: SetPlace | None) -> Replacements:
    """What Megatron asks of sizes beside the config, on a rank with other parts than its set's."""
    hooks: dict[Rebinding, Make] = {}
    if place is None:
        return hooks
    if place.parts.units("vocabulary_rows") is not None:
        hooks[under_plan.VOCAB_RANGE] = partial(_with_own_rows, place)
    if not place.parts.has_any("vocabulary_rows", place.index):
        hooks[under_plan.LOOK_UP] = looking_up_nothing
        hooks[under_plan.LOSS] = without_a_logit
    if not place.parts.has_any("mlp_columns", place.index):
        hooks[under_plan.SPLIT_GATE] = saved_as_nothing
    return hooks


def _with_own_rows(place: SetPlace, stock: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `VocabUtility.vocab_range_from_per_partition_vocab_size`, for a rank of a set."""
    rows = place.parts.units("vocabulary_rows")
    assert rows is not None, "equal rows are stock's own"

    def vocab_range_from_per_partition_vocab_size(
        per_partition_vocab_size: int, rank: int, world_size: int
    ) -> Any:
        if world_size != place.degree:  # the whole model is built on one rank
            return stock(per_partition_vocab_size, rank, world_size)
        # Without rows there is a logit of none of them (`without_rows`).
        start = sum(rows[:rank])
        return start, start + rows[rank]

    return vocab_range_from_per_partition_vocab_size
