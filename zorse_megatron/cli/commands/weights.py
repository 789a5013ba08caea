"""`zorse import-hf` and `export-hf`: weights of Hugging Face models, in and out."""

import shlex
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from pydantic_core import PydanticCustomError

from zorse_megatron.cli.console import Output, refusal
from zorse_megatron.cli.options import answers
from zorse_megatron.emulate.rank_jobs import exits_on_signals
from zorse_megatron.extras import refuse_without
from zorse_megatron.files.quantities import MEMORY_SIZE


class ExportedType(StrEnum):
    """Types of exported weights."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"


@answers
def import_hf(
    source: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="Folder with config.json and safetensors files."),
    ],
    checkpoint: Annotated[
        Path, typer.Argument(metavar="CHECKPOINT", help="A new directory, for Megatron to load.")
    ],
) -> Output:
    """Convert a Hugging Face model into a checkpoint that any plan and stock Megatron load.

    Prints the flags that build the model. Types: llama, mistral, qwen2 and 2.5, qwen3; mixtral,
    qwen2_moe and qwen3_moe. No GPU and no code of the model is needed; pickles are never read.
    """
    refuse_without("train", what="zorse import-hf")
    from zorse_megatron.weights.convert import import_model

    with exits_on_signals():
        done = import_model(source, checkpoint)
    # Not --load: a restarted job resumes from what it has saved.
    load = ("--pretrained-checkpoint", str(checkpoint))
    return Output(
        values={
            "parameters": done.num_parameters,
            "flags": list(done.flags),
            "load": list(load),
        },
        shown=(
            f"{done.num_parameters:,} parameters",
            f"plan it with: zorse plan --model {shlex.quote(str(source))}",
            f"train it with: {shlex.join((*done.flags, *load))}",
        ),
        notes=done.notes,
        written=[checkpoint],
    )


@answers
def export_hf(
    checkpoint: Annotated[
        Path,
        typer.Argument(
            metavar="CHECKPOINT", help="The directory given to --save, or one iteration's in it."
        ),
    ],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new directory for the model.")],
    source: Annotated[
        Path,
        typer.Option(
            "--source",
            help="Folder of the model that was imported: config.json and tokenizer come from it.",
        ),
    ],
    *,
    dtype: Annotated[
        ExportedType | None,
        typer.Option(
            "--dtype", help="Type of the weights. Default: as source; of adapters: as stored."
        ),
    ] = None,
    shard_size: Annotated[
        str, typer.Option("--shard-size", metavar="SIZE", help="Largest file, for instance 5GB.")
    ] = "5GB",
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Write a LoRA run's adapters, as peft's files.")
    ] = False,
    merge: Annotated[
        Path | None,
        typer.Option(
            "--merge",
            metavar="BASE",
            help="Add a LoRA run's adapters to the checkpoint that it was trained upon.",
        ),
    ] = None,
) -> Output:
    """Convert a checkpoint's weights into a Hugging Face model.

    The checkpoint is one of a plan or of stock Megatron (`--ckpt-format torch_dist`).
    """
    if adapter and merge is not None:
        raise refusal("--merge", "it beside --adapter", "one of them", "Export twice for both.")
    refuse_without("train", what="zorse export-hf")
    from zorse_megatron.weights.convert import export_adapter, export_model

    shard_bytes = _shard_bytes(shard_size)
    kind = None if dtype is None else dtype.value
    with exits_on_signals():
        if adapter:
            done = export_adapter(checkpoint, folder, source=source, dtype=kind)
        else:
            done = export_model(
                checkpoint,
                folder,
                source=source,
                dtype=kind,
                shard_bytes=shard_bytes,
                merge=merge,
            )
    num_bytes = sum(path.stat().st_size for path in done.files)
    return Output(
        values={"bytes": num_bytes, "files": [path.name for path in done.files]},
        shown=[f"{folder}: {len(done.files)} files, {num_bytes:,} bytes"],
        notes=done.notes,
        written=[folder],
    )


def _shard_bytes(text: str) -> int:
    try:
        return round(MEMORY_SIZE.parse(text))
    except PydanticCustomError as error:
        raise refusal(
            "--shard-size", text, error.message(), "Write a number and its unit."
        ) from error
