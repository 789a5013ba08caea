"""Behaviour of a training framework beyond what a plan says."""

from dataclasses import dataclass, replace
from typing import Literal

from zorse_megatron.schedules.receive_openings import RECEIVES_AHEAD
from zorse_megatron.schedules.send_closings import SENDS_BEHIND


@dataclass(frozen=True, kw_only=True)
class Framework:
    """Habits of the program that trains. The defaults are those of this project's runtime."""

    state: Literal["sharded", "replicated"] = "sharded"
    """sharded: each rank owns its part of the optimizer state, gradients are reduce-scattered and
    parameters gathered. replicated: each rank owns all of it and gradients are all-reduced."""
    receives_ahead: int = RECEIVES_AHEAD
    """How many computations before its place in the list a receive may begin; where transfers
    block, none."""
    sends_behind: int = SENDS_BEHIND
    """How many computations after its place in the list a send may be on its way; where transfers
    block, none."""
    blocking_transfers: bool = False
    """Whether a rank stops at each send and each receive until it is done, as with `send` and
    `recv` of torch.distributed on the stream that computes."""
    interleaves_as_megatron: bool = False
    """Whether transfers are posted and waited for as by Megatron's interleaved schedule: a rank
    stops at each send of an activation, though not at others (`stock_transfers`)."""
    paired_transfers: bool = False
    """Whether, where transfers block, a receive is started just before the computation that it is
    for, together with the send of the other direction before it, as in Megatron's
    `send_forward_recv_backward`."""
    split_transfers: bool = True
    """Whether each rank of a tensor-parallel set sends its part of an activation. If not, each
    sends all of it to its counterpart unless ranks have parts of the sequence, as in Megatron's
    `get_tensor_shapes`."""
    rebuild_bytes_per_s: float | None = None
    """How fast the receiver makes a tensor out of what arrived, before it can compute; None: no
    such work."""
    gathers_ahead: bool = True
    """Whether a chunk's gather behind its step starts there; if not, with its first forward, as by
    Megatron's forward hooks (--overlap-param-gather)."""
    sums_at_scale: int = 2
    """How often all ranks sum one number before the gradients are scaled: the tokens, and whether
    anybody wants the step to be run again (`RerunStateMachine.should_run_forward_backward`)."""
    broadcasts_tokens: bool = False
    """Whether the tokens are not among them, but are broadcast along each pipeline and then summed
    over the replicas of each stage (`finalize_model_grads`)."""
    sums_after_step: int = 0
    """The same after the step, over all ranks of a pipeline: whether it was made and the norm
    (`train_step`), and the learning rate (`training_log`). Under a plan each rank knows these."""


RUNTIME = Framework()
_STOCK = Framework(
    split_transfers=False,
    gathers_ahead=False,
    sums_at_scale=1,
    broadcasts_tokens=True,
    sums_after_step=3,
)
STOCK_1F1B = replace(_STOCK, blocking_transfers=True, paired_transfers=True)
"""Megatron's own 1F1B with a distributed optimizer."""
STOCK_INTERLEAVED = replace(_STOCK, interleaves_as_megatron=True)
"""Its interleaved schedule with `--overlap-p2p-communication-warmup-flush`. The rank stops until an
activation has left, whose memory is freed (`pp_post_forward`, deallocate_pipeline_outputs)."""
