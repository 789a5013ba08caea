"""Stock's check for inf and nan in gradients, once per step.

Stock asks for the norm of every bucket before it reduces it, and each time the host waits for the
device. Here the norms are noted where stock asks for them, and looked at together at the end of the
passes; what is wrong is then told by stock's own check, in its words. Where stock compares with
other runs of the step (--rerun-mode) or with other steps (--check-for-large-grads), it checks when
it always does.

Source: `megatron.core.distributed.param_and_grad_buffer._ParamAndGradBucketGroup.check_grads`.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
from megatron.core.rerun_state_machine import RerunMode, get_rerun_state_machine


def is_at_once(*, check_for_large: bool) -> bool:
    """Whether gradients have to be checked where stock does it."""
    return check_for_large or get_rerun_state_machine().mode != RerunMode.DISABLED


def check_noted(groups: Iterable[Any]) -> None:
    """Check all norms that `groups` have noted; the host waits once.

    Raises RuntimeError with stock's message for the first bucket with inf or nan.
    """
    noted = []
    for group in groups:
        noted.append(group.noted_norms)
        group.noted_norms = []
    norms = [norm.float() for each in noted for norm in each]
    if norms and not bool(torch.stack(norms).isfinite().all()):
        for each in noted:
            buckets = [SimpleNamespace(grad_data=_Noted(norm)) for norm in each]
            _ParamAndGradBucketGroup.check_grads(SimpleNamespace(buckets=buckets), True, False)


@dataclass(frozen=True)
class _Noted:
    """Gradients of which only the norm is known."""

    value: torch.Tensor

    def norm(self, p: int) -> torch.Tensor:
        return self.value
