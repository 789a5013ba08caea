"""What a training framework does that a plan does not say."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Framework:
    """Habits of the program that trains. The defaults are those of this project's runtime."""

    state: Literal["sharded", "replicated"] = "sharded"
    """sharded: each rank owns its part of the optimizer state, gradients are reduce-scattered and
    parameters gathered. replicated: each rank owns all of it and gradients are all-reduced."""
    blocking_transfers: bool = False
    """Whether a rank stops at each send and each receive until it is done, as with `send` and
    `recv` of torch.distributed on the stream that computes."""
    split_transfers: bool = False
    """Whether each rank of a tensor-parallel set sends its part of an activation. If not, each
    sends all of it to its counterpart."""
    rebuild_bytes_per_s: float | None = None
    """How fast the receiver makes a tensor out of what arrived, before it can compute; None: no
    such work."""


RUNTIME = Framework()
