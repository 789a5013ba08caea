"""Stock's check for inf and nan in gradients, once per step.

Stock asks for the norm of every bucket before it reduces it, and each time the host waits for the
device. Here the norms are noted where stock asks for them, and looked at together at the end of the
passes. What is wrong is then told by stock's own check, in its words; with --rerun-mode
validate_results, its default, that check gets all of them, to run the step again. Only with
--check-for-large-grads gradients are checked where stock does it.

Source: `megatron.core.distributed.param_and_grad_buffer._ParamAndGradBucketGroup.check_grads`.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
from megatron.core.rerun_state_machine import RerunMode, get_rerun_state_machine


def check_noted(groups: Iterable[Any]) -> None:
    """Check all norms that `groups` have noted; the host waits once.

    Raises RuntimeError with stock's message for the first bucket with inf or nan, or lets stock run
    the step again where it does that.
    """
    noted = []
    for group in groups:
        noted.append(group.noted_norms)
        group.noted_norms = []
    norms = [norm for each in noted for norm in each]
    if not norms:
        return
    in_host = torch.stack([norm.float() for norm in norms]).cpu()
    is_finite = bool(in_host.isfinite().all())
    if is_finite and get_rerun_state_machine().mode == RerunMode.DISABLED:
        return
    # Those of the device appear in the message.
    known = iter(in_host if is_finite else norms)
    for each in noted:
        buckets = [SimpleNamespace(grad_data=_Noted(next(known))) for _ in each]
        _ParamAndGradBucketGroup.check_grads(SimpleNamespace(buckets=buckets), True, False)


@dataclass(frozen=True)
class _Noted:
    """Gradients of which only the norm is known."""

    value: torch.Tensor

    def norm(self, p: int) -> torch.Tensor:
        return self.value
