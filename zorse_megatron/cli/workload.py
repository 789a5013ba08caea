"""The model and batch to train, from a config.json, a preset or flags; a plan against them."""

import dataclasses
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import get_args

from zorse_megatron.cli.console import refusal, refuse
from zorse_megatron.errors import FlagError, ModelError, Problem
from zorse_megatron.files.strict import read_file
from zorse_megatron.files.wording import did_you_mean
from zorse_megatron.flags.check import check_command
from zorse_megatron.flags.command import Command, read_command, unknown_flags
from zorse_megatron.flags.conditions import MUON, barring_tp, fuses_weight_gradients
from zorse_megatron.flags.model_in_flags import (
    batch_size_from_flags,
    computing_from_flags,
    job_dtype,
    shape_from_flags,
)
from zorse_megatron.gpus.gpu import DTYPE_OF, Dtype, DtypeChoice, GpuKind
from zorse_megatron.inputs.hugging_face import CONFIG_FILE, config_path, parse_config
from zorse_megatron.inputs.lora import LORA_FLAG, misfits, parse_lora
from zorse_megatron.inputs.model import MODELS, USUAL, Computing, ModelShape, canonical_model
from zorse_megatron.plan.plan import Plan

# A number with digits too many is reported, not computed with.
MAX_LAYERS = 100_000
MAX_SIZE = 100_000_000
MAX_GLOBAL_BATCH_SIZE = 100_000
_WAYS = "a config.json, a well-known model or the flags of a training command"


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model, and what is said of how it is trained."""

    model: ModelShape
    dtype: DtypeChoice | None
    """None: nothing was said."""
    global_batch_size: int | None
    """None: nothing was said."""
    computing: Computing = USUAL
    """How it is computed."""
    lacks_seq_length: bool = False
    """Whether the model is known, but not how long its samples are: a config.json has a limit."""
    notes: tuple[str, ...] = ()
    """For people: of the training command, or of the model's file."""
    requested_tensor_parallel: int = 1
    """Ranks of a tensor-parallel group, if the command says so; a plan may have others."""
    file_flags: tuple[str, ...] | None = None
    """Megatron's flags for the model of a config.json, () where none can build it; None: it is of
    something else, and has those of its shape."""
    barring_tp: tuple[str, ...] = ()
    """Flags of the command with which no plan may have tensor-parallel groups."""
    may_offload: bool = True
    """Whether the command's optimizer can have its state in host memory."""
    may_split_backward: bool = True
    """Whether the command's layers can compute weight gradients apart from backwards."""


def workload_of(
    *,
    model: str | None,
    flags: Sequence[str] | None,
    global_batch_size: int | None = None,
    seq_length: int | None = None,
    dtype: str | None = None,
    dtype_may_be_auto: bool = False,
    plan: Plan | None = None,
    kinds: Mapping[str, GpuKind] | None = None,
    checks_flags: bool = True,
    is_whole: bool = False,
    by_stock: bool = False,
) -> Workload:
    """Return what the options and the flags after `--` say together.

    `plan`: that the flags are to train; None: they are to be planned for. `kinds`: figures of GPUs
    that only the cluster file has; `checks_flags`: whether flags must go with a plan; `is_whole`:
    whether they are all of a command that is to be run, `by_stock`: by unmodified Megatron. Raises
    CommandError where options and flags contradict each other, FlagError for flags that do not go
    with a plan, ModelError for an inconsistent model.
    """
    model, flags = model_or_flags(model, flags)
    is_auto = dtype_may_be_auto and dtype == "auto"
    chosen = None if is_auto else dtype_named(dtype)
    if flags is not None:
        check = partial(check_command, plan=plan, kinds=kinds, is_whole=is_whole, by_stock=by_stock)
        found = _from_flags(flags, check if checks_flags else None)
        found = _with_options(found, global_batch_size, seq_length, chosen)
        # What a plan says of its groups takes precedence over what the command says of the job.
        return dataclasses.replace(found, dtype="auto") if is_auto else found
    workload, said = _of_model(model, seq_length, plan), "auto" if is_auto else chosen
    return dataclasses.replace(workload, dtype=said, global_batch_size=global_batch_size)


def _of_model(model: str | None, seq_length: int | None, plan: Plan | None) -> Workload:
    """A named model; a well-known one has no length of the user's, and takes the plan's."""
    if model is None:
        raise refusal(
            "--model",
            "no model",
            f"--model with {_WAYS}, or those flags after --",
            "Such as --model llama-7b, or: -- pretrain_gpt.py --num-layers 32 ...",
        )
    if seq_length is None and plan is not None and not _is_file_name(model):
        seq_length = plan.model.seq_length
    workload = named_model(model)
    return workload if seq_length is None else at_seq_length(workload, seq_length)


def model_or_flags(
    model: str | None, flags: Sequence[str] | None
) -> tuple[str | None, Sequence[str] | None]:
    """Tell the two apart: --model may be the flags in quotes. Raises CommandError for both."""
    if model is not None and flags is not None:
        raise refusal(
            "--model", f"{model!r}, and flags after --", "one of the two", "Leave one out."
        )
    if model is not None and "--" in model and not _exists(model):
        return None, _split(model)
    return model, flags


def dtype_named(name: str | None) -> Dtype | None:
    """Return the dtype of that name, long or short. Raises CommandError for another text."""
    if name is None:
        return None
    names: dict[str, Dtype] = {known: known for known in get_args(Dtype)}
    names.update(DTYPE_OF.items())
    if name in names:
        return names[name]
    listed = ", ".join(get_args(Dtype))
    raise refusal("--dtype", f'"{name}"', f"one of {listed}", did_you_mean(name, names))


def _from_flags(flags: Sequence[str], check: Callable[[Command], list[Problem]] | None) -> Workload:
    """Everything from the flags. `check`: yields why they do not go with a plan; None: they may."""
    command = read_command(flags)
    problems = [] if check is None else check(command)
    notes = [] if check is None else unknown_flags(command)[1]
    requested = getattr(command.args, "tensor_model_parallel_size", None) or 1
    try:
        shape = shape_from_flags(flags, tensor_parallel=requested)
    except ModelError as error:
        if not problems:
            raise
        known = {problem.where for problem in problems}
        problems += [each for each in error.problems if each.where not in known]
    if problems:
        raise FlagError("the training command does not go with a plan", problems)
    _refuse_absurd(shape)
    return Workload(
        model=shape,
        dtype=DTYPE_OF[job_dtype(command.args)],
        global_batch_size=batch_size_from_flags(flags),
        computing=computing_from_flags(command.args),
        notes=tuple(notes),
        requested_tensor_parallel=requested,
        barring_tp=tuple(barring_tp(command.args)),
        may_offload=getattr(command.args, "optimizer", None) != MUON,
        may_split_backward=not fuses_weight_gradients(command.args),
    )


def _with_options(
    found: Workload, batch: int | None, seq_length: int | None, dtype: Dtype | None
) -> Workload:
    """With the batch size where flags have none. Raises CommandError where options contradict."""
    pairs = (
        ("--global-batch-size", batch, found.global_batch_size),
        ("--seq-length", seq_length, found.model.seq_length),
        ("--dtype", dtype, found.dtype),
    )
    contradictions = [
        Problem(
            where=option,
            found=f"{ours}, and {theirs} in the training command",
            expected="the same in both",
            remedy="Leave the option out; the training command says it.",
        )
        for option, ours, theirs in pairs
        if ours is not None and theirs not in (None, ours)
    ]
    refuse(contradictions, "the options do not fit the training command")
    size = batch if found.global_batch_size is None else found.global_batch_size
    return dataclasses.replace(found, global_batch_size=size)


def named_model(name: str) -> Workload:
    """A model of which nothing else is said: that of a file or folder, or a well-known one.

    Raises ModelError for a file that cannot be used, CommandError for any other name.
    """
    if _is_file_name(name):
        path = config_path(name)
        return model_in(read_file(path, CONFIG_FILE), source=str(path))
    known = MODELS.get(canonical_model(name))
    if known is None:
        raise refusal(
            "--model",
            f'"{name}", which is neither a file nor a well-known model',
            _WAYS,
            did_you_mean(name, MODELS),
        )
    return Workload(model=known, dtype=None, global_batch_size=None)


def model_in(data: bytes, source: str) -> Workload:
    """The model in a config.json. Raises ModelError with every problem."""
    found = parse_config(data, source=source)
    flags = [f"Megatron's flags for {source}: {' '.join(found.flags)}"] if found.flags else []
    return Workload(
        model=found.shape,
        dtype=None,
        global_batch_size=None,
        lacks_seq_length=True,
        file_flags=found.flags,
        notes=(*found.notes, *flags),
    )


def at_seq_length(workload: Workload, seq_length: int) -> Workload:
    """The same with samples of this many tokens; learned positions reach as far at least."""
    shape, notes = workload.model, workload.notes
    if workload.lacks_seq_length and seq_length > shape.seq_length:
        notes = (*notes, f"{shape.name} is for samples of at most {shape.seq_length} tokens")
    learned = shape.position_embedding == "learned"
    positions = max(shape.max_positions, seq_length) if learned else shape.max_positions
    model = dataclasses.replace(shape, seq_length=seq_length, max_positions=positions)
    return dataclasses.replace(workload, model=model, lacks_seq_length=False, notes=notes)


def with_lora(
    workload: Workload, text: str | None, *, has_command: bool = False, where: str = "--lora"
) -> Workload:
    """The same with adapters, which alone are trained; None: as it is. Raises CommandError.

    `has_command`: whether the workload is a training command's, which says so itself.
    """
    problems: list[Problem] = []
    lora = None if text is None else parse_lora(text, problems, where=where)
    if lora is None or (has_command and lora == workload.computing.lora):
        refuse(problems)
        return workload
    if has_command:
        raise refusal(
            where,
            f"{text}, beside a training command with {workload.computing.lora or 'no adapters'}",
            f"{LORA_FLAG} in the training command alone",
            "It is that which trains.",
        )
    refuse([*problems, *misfits(lora, workload.model, where=where)])
    computing = dataclasses.replace(workload.computing, lora=lora)
    return dataclasses.replace(workload, computing=computing)


def _exists(name: str) -> bool:
    """Whether there is such a file; a long command is no name of one."""
    try:
        return Path(name).exists()
    except OSError:
        return False


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise refusal(
            "--model",
            f"flags that cannot be split into words ({error})",
            "the flags of a training command, quoted as in a shell",
            "Check the quotes, or give the flags after --.",
        ) from error


def _is_file_name(name: str) -> bool:
    is_there = config_path(name).is_file()
    return is_there or "/" in name or Path(name).suffix.lower() in (".json", ".yaml", ".yml")


def _refuse_absurd(shape: ModelShape) -> None:
    limits = {
        "num_layers": MAX_LAYERS,
        **dict.fromkeys(
            ("hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels"), MAX_SIZE
        ),
        **dict.fromkeys(("vocab_size", "seq_length", "max_positions"), MAX_SIZE),
    }
    problems = [
        Problem(
            where="--" + name.replace("_", "-"),
            found=f"{getattr(shape, name)}",
            expected=f"at most {limit}",
            remedy="Check the digits.",
        )
        for name, limit in limits.items()
        if getattr(shape, name) > limit
    ]
    if problems:
        raise ModelError("the model of these Megatron flags cannot be planned", problems)
