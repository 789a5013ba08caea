"""torch's own norms under sequence parallelism.

A norm works position by position, so it needs nothing to run on a part of the sequence; its weights
must only be marked as having seen a part (`data_parallel.set_sums`). Stock marks Apex's and
Transformer Engine's norms, and refuses torch's, which `--transformer-impl local` has without Apex.
"""

from collections.abc import Callable
from typing import Any

from zorse_megatron.adapter.groups.global_groups import presented


def with_sequence_parallelism(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `WrappedTorchNorm.__new__`."""

    def new_norm(cls: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
        if not config.sequence_parallel:
            return stock(cls, config, *args, **kwargs)
        with presented(config, "sequence_parallel", False):
            norm = stock(cls, config, *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = True
        return norm

    return new_norm
