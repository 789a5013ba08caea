"""The command to type after `zorse plan`: start the plan, write it, or explain it."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from zorse_megatron.cli.command_group import own_options
from zorse_megatron.cli.options import WorkloadOptions
from zorse_megatron.cli.workload_costs import WorkloadCosts
from zorse_megatron.flags.command import read_command
from zorse_megatron.flags.table import WITHOUT_DROPOUT
from zorse_megatron.inputs.lora import LORA_FLAG
from zorse_megatron.inputs.model import flags_of_shape
from zorse_megatron.launch.training_command import stripped_of_layout

_OF_THIS_ANSWER = ("--json", "--verbose", "-v")
_DTYPE_FLAGS = {"bfloat16": ("--bf16",), "float16": ("--fp16",)}


@dataclass(frozen=True, kw_only=True)
class NextCommand:
    """Words of a shell, and what is to be known of them."""

    words: tuple[str, ...]
    lacks_data: bool = False
    """Whether it trains a model of which no training command was given."""

    @property
    def text(self) -> str:
        """On one line."""
        return shlex.join(self.words)

    @property
    def line(self) -> str:
        """For people, who may paste it as it is."""
        return f"next{' (add your data)' * self.lacks_data}: {self.text}"


def next_command(
    given: WorkloadOptions,
    *,
    plan: Path | None,
    cluster: Path,
    costs: WorkloadCosts,
    can_be_trained: bool,
    is_stock: bool,
) -> NextCommand:
    """Write the plan, or start one that was written; explain one that this version cannot train.

    `is_stock`: whether it is for unmodified Megatron. `plan`: its file; None: none was asked for.
    `cluster`: of the GPUs that it uses. A model without a training
    command is started with the flags of its shape.
    """
    flags, model, own = given.flags, given.model, own_options(given.context)
    if plan is None:
        kept = [word for word in own if word not in _OF_THIS_ANSWER]
        after = () if flags is None else ("--", *flags)
        return NextCommand(words=("zorse", "plan", *kept, "--out", "plan.json", *after))
    files = (str(plan), "--cluster", str(cluster))
    can_be_trained = can_be_trained or is_stock
    if flags is None and model is not None and "--" in model:
        flags = tuple(shlex.split(model))
    stock = ("--stock",) if is_stock else ()
    launch = ("zorse", "launch", files[0], *stock, *files[1:], "--torchrun", "--")
    if can_be_trained and flags is not None:
        return NextCommand(words=(*launch, *(_for_stock(flags) if is_stock else flags)))
    made = _flags_of(costs) if can_be_trained else ()
    if made:
        words = (*launch, *(_for_stock(made) if is_stock else made))
        return NextCommand(words=words, lacks_data=True)
    what = ("--", *flags) if flags is not None else ("--model", model or "")
    profiles = (("--profile", str(path)) for path in given.profiles)
    options = (("--dtype", given.dtype), ("--seq-length", given.seq_length), *profiles)
    kept = [str(word) for option in options if option[1] is not None for word in option]
    return NextCommand(words=("zorse", "explain", *files, *kept, *what))


def _for_stock(given: Sequence[str]) -> tuple[str, ...]:
    """A script of Megatron's, which has no other entry, and no flags that the layout decides."""
    script = () if read_command(given).script else ("pretrain_gpt.py",)
    return (*script, *stripped_of_layout(given))


def _flags_of(costs: WorkloadCosts) -> tuple[str, ...]:
    """Megatron's flags of a model and batch; empty where the shape does not say all of them."""
    workload, lora = costs.workload, costs.workload.computing.lora
    shape = workload.file_flags
    if shape:
        positions = max(workload.model.max_positions, workload.model.seq_length)
        shape = (*shape, "--seq-length", str(workload.model.seq_length))
        shape = (*shape, "--max-position-embeddings", str(positions))  # the last one counts
    elif shape is None:
        shape = flags_of_shape(workload.model)
    if not shape:
        return ()
    return (
        *shape,
        *("--global-batch-size", str(costs.inputs.global_batch_size)),
        *_DTYPE_FLAGS.get(costs.dtype, ()),
        *(() if lora is None else (LORA_FLAG, str(lora), "--pretrained-checkpoint", "BASE")),
        *WITHOUT_DROPOUT,  # as these models are trained
        *("--eval-interval", "1000"),  # without one Megatron ends
    )
