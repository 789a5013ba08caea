"""An optimizer on the CPU that keeps its state as the fused Adams of GPUs do."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch


class FusedAdam(torch.optim.Optimizer):
    """Stands in for Transformer Engine's: counts steps per group, and not in empty groups."""

    def __init__(self, params: Any, *, lr: float, weight_decay: float, **defaults: Any) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, **defaults})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            if group["params"]:
                group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                    state["exp_avg_sq"] = torch.zeros_like(parameter)
                torch.optim._functional.adamw(
                    [parameter],
                    [parameter.grad],
                    [state["exp_avg"]],
                    [state["exp_avg_sq"]],
                    [],
                    [torch.tensor(float(group["step"] - 1))],
                    amsgrad=False,
                    beta1=group["betas"][0],
                    beta2=group["betas"][1],
                    lr=group["lr"],
                    weight_decay=group["weight_decay"],
                    eps=group["eps"],
                    maximize=False,
                )


@contextmanager
def fused_adam(wanted: bool) -> Iterator[None]:
    """Let Megatron build its optimizer on `FusedAdam`, if wanted."""
    import megatron.core.optimizer as stock

    with ExitStack() as stack:
        if wanted:
            stack.enter_context(mock.patch.object(stock, "Adam", FusedAdam))
            stack.enter_context(mock.patch.object(stock, "USING_PYTORCH_OPTIMIZER", False))
        yield
