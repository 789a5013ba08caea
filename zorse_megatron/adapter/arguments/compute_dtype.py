"""In which type each group computes, and what that means for Megatron's arguments on its ranks.

Stock knows one type for the job (`--fp16`, `--bf16`, or neither for fp32). Under a plan each rank's
arguments say the type of its own group, so that stock builds its chunks in it; what must be one for
the job (gradients in fp32, the loss scale) is the same on all ranks. An fp16 group anywhere gives
the whole job a loss scale: the gradients that reach it come from the loss through all others.
"""

from argparse import Namespace
from dataclasses import replace
from typing import Any

import torch

from zorse_megatron.flags.computing_flags import compute_dtypes, is_mixed, job_dtype
from zorse_megatron.schema.plan.plan import ComputeDtype, Plan

_TORCH: dict[ComputeDtype, torch.dtype] = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
}


def torch_dtype(name: ComputeDtype) -> torch.dtype:
    """The type in torch's terms."""
    return _TORCH[name]


def set_compute_dtype(args: Namespace, plan: Plan) -> None:
    """Let this rank's arguments say the type of its group; before stock validates them.

    The job's own type stays in `args.zorse_job_dtype`.
    """
    args.zorse_job_dtype = job = job_dtype(args)
    if not is_mixed(plan):
        return
    dtypes = compute_dtypes(plan, job)
    mine = dtypes[plan.group_of_rank(args.rank)]
    args.fp16, args.bf16 = mine == "fp16", mine == "bf16"
    args.accumulate_allreduce_grads_in_fp32 = True
    if "fp16" in dtypes and not args.loss_scale:
        # As stock does with --fp16: overflows are the loss scale's business.
        args.check_for_nan_in_loss_and_grad = False


def with_one_loss_scale(config: Any, dtypes: tuple[ComputeDtype, ...]) -> Any:
    """An optimizer config that makes the same loss scaler on all ranks, whatever they compute in.

    Stock makes one where fp16 is set; the types of parameters it reads from themselves.
    """
    return replace(config, fp16="fp16" in dtypes, bf16="fp16" not in dtypes and "bf16" in dtypes)
