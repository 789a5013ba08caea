"""Options of Megatron's DDP wrapper that unequal shards cannot keep."""

from typing import Any

import torch

from zorse_megatron.errors import Problem


def option_problems(config: Any, ddp_config: Any, module: torch.nn.Module) -> list[Problem]:
    """All that is in the configuration or the module."""
    problems = []
    if not ddp_config.use_distributed_optimizer:
        problems.append(
            _problem("use_distributed_optimizer", "False", "True", "Set it in the DDP config.")
        )
    if not config.calculate_per_token_loss:
        problems.append(
            _problem("calculate_per_token_loss", "False", "True", "Add --calculate-per-token-loss.")
        )
    if ddp_config.overlap_param_gather and not ddp_config.overlap_grad_reduce:
        problems.append(
            _problem("overlap_grad_reduce", "False", "True", "Add --overlap-grad-reduce.")
        )
    problems += [
        _problem(name, repr(value), repr(expected), f"Remove {flag}.")
        for name, expected, flag in _UNSUPPORTED
        if (value := getattr(ddp_config, name)) != expected
    ]
    experts = [n for n, p in module.named_parameters() if not getattr(p, "allreduce", True)]
    if experts:
        problems.append(
            _problem(
                "expert-parallel parameters",
                f"{len(experts)}, {experts[0]} first",
                "none",
                "Use --expert-model-parallel-size 1.",
            )
        )
    return problems


# Each changes what is in the buffers or who reduces them: (field, value it must have, flag).
_UNSUPPORTED = (
    ("num_distributed_optimizer_instances", 1, "--num-distributed-optimizer-instances"),
    ("average_in_collective", False, "--ddp-average-in-collective"),
    (
        "reduce_scatter_with_fp32_accumulation",
        False,
        "--ddp-reduce-scatter-with-fp32-accumulation",
    ),
    ("fp8_param_gather", False, "--fp8-param-gather"),
    ("fp4_param_gather", False, "--fp4-param-gather"),
    ("nccl_ub", False, "--use-nccl-ub"),
    ("use_megatron_fsdp", False, "--use-megatron-fsdp"),
    ("use_custom_fsdp", False, "--use-custom-fsdp"),
)


def _problem(where: str, found: str, expected: str, remedy: str) -> Problem:
    return Problem(where=where, found=found, expected=expected, remedy=remedy)
