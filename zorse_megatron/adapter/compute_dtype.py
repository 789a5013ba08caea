"""In which type each group computes, and the fp32 values behind 16-bit parameters.

Stock knows one type for the job (`--fp16`, `--bf16`, or neither for fp32). Under a plan each rank's
arguments say the type of its own group, so that stock builds its chunks in it; what must be one for
the job (gradients in fp32, the loss scale) is the same on all ranks. An fp16 group anywhere gives
the whole job a loss scale: the gradients that reach it come from the loss through all others.
"""

import copy
import dataclasses
from argparse import Namespace
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from zorse_megatron.flags.model_in_flags import compute_dtypes, is_mixed, job_dtype
from zorse_megatron.gpus.gpu import ComputeDtype
from zorse_megatron.plan.plan import Plan
from zorse_megatron.runtime.host_link import copied_to_host

TORCH_DTYPES: dict[ComputeDtype, torch.dtype] = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
}


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


def boundary_dtype(config: Any) -> torch.dtype:
    """The dtype of activations between stages, as stock's `P2PCommunicator` has it."""
    return config.params_dtype if config.pipeline_dtype is None else config.pipeline_dtype


def with_one_loss_scale(config: Any, dtypes: tuple[ComputeDtype, ...]) -> Any:
    """An optimizer config that makes the same loss scaler on all ranks, whatever they compute in.

    Stock makes one where fp16 is set; the types of parameters it reads from themselves.
    """
    return replace(config, fp16="fp16" in dtypes, bf16="fp16" not in dtypes and "bf16" in dtypes)


# fp32 values behind 16-bit parameters, where groups compute in different types.
#
# Every group keeps fp32 main parameters, and those must not depend on the type that a group
# computes in: two copies of a tied embedding stay equal, and a checkpoint is the same for any plan.
# So where a parameter gets a value of another type (when the model is initialised or loaded), what
# the rank owns of the value is kept in the host until main parameters are made of it. Checkpoints
# of such jobs hold all parameters in fp32.


_EXACT = "zorse_exact"
_ORIGINAL = "zorse_original"


def keep_exact(chunk: Any, parameter: torch.nn.Parameter, value: torch.Tensor) -> None:
    """Remember a value that the parameter's own type cannot hold, as far as it is owned."""
    if parameter.requires_grad and parameter.dtype not in (value.dtype, torch.float32):
        keep_exact_part(parameter, chunk.owned_of(parameter, value.detach()))


def keep_exact_part(parameter: torch.nn.Parameter, owned: torch.Tensor) -> None:
    """Remember the value of what this rank owns of a parameter."""
    setattr(parameter, _EXACT, copied_to_host(owned.float()))


@torch.no_grad()
def take_exact(optimizer: Any) -> None:
    """Make main parameters of the values that are kept, where there are any."""
    for _, parameter, _, shard in optimizer.owned_shards:
        exact = parameter.__dict__.pop(_EXACT, None)
        if exact is not None:
            optimizer.write(shard, exact)


@torch.no_grad()
def start_from_main(models: Iterable[Any], optimizer: Any) -> None:
    """Make parameters of main parameters; a collective call.

    So the first step computes with main parameters rounded once, wherever they come from. Of a
    chunk that is released this makes the shards.
    """
    for chunk, parameter, (start, stop), main in optimizer.owned_shards:
        if parameter.dtype != torch.float32:
            chunk.write_parameter(parameter, start, stop, optimizer.read(main))
    for model in models:
        for group in () if model.shards is not None else reversed(model.bucket_groups):
            for bucket in group.buckets:
                group.gather_bucket(bucket).wait()
        for parameter in model.parameters():
            parameter.__dict__.pop(_EXACT, None)


# Checkpoints.


def in_fp32(entry: Any) -> Any:
    """An entry of a sharded state dict with an fp32 tensor in place of a 16-bit parameter."""
    data = getattr(entry, "data", None)
    if not isinstance(data, torch.Tensor) or data.dtype not in (torch.float16, torch.bfloat16):
        return entry
    changed = copy.copy(entry)
    # Of what is frozen all is loaded at once, and there is no room for it twice.
    changed.data = (data.detach() if data.requires_grad else copied_to_host(data)).float()
    if "dtype" in {field.name for field in dataclasses.fields(entry)}:
        changed.dtype = changed.data.dtype
    return standing_for(entry, changed)


def standing_for(original: Any, entry: Any) -> Any:
    """Let an entry say which one of the model it stands for; returns it."""
    setattr(entry, _ORIGINAL, original)
    return entry


def original_entry(entry: Any) -> Any:
    """The model's own entry that one of a sharded state dict stands for, or that entry itself."""
    return getattr(entry, _ORIGINAL, entry)
