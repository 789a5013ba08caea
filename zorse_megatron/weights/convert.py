"""`zorse import-hf` and `export-hf`: whole models, tensor by tensor, complete or not at all."""

import shlex
import shutil
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from zorse_megatron.errors import CheckpointError, ModelError, OutputError, Problem
from zorse_megatron.files.read_write import remedy_for, write_text
from zorse_megatron.files.writable import disk_problem, folder_problems
from zorse_megatron.live.checkpoint_files import (
    TRACKER,
    Checkpoint,
    file_record,
    write_manifest,
)
from zorse_megatron.weights import adapters as lora_files
from zorse_megatron.weights.adapters import Adapters, holds_adapters, other_base, read_adapters
from zorse_megatron.weights.model_folder import (
    CONFIG,
    DTYPES,
    IN_FILES,
    Description,
    ModelFiles,
    copy_companions,
    describe,
    unreadable_companions,
    write_model,
    write_tensors,
)
from zorse_megatron.weights.names import WholeTensor, stateful_modules
from zorse_megatron.weights.opened import iteration_folder, misfits, opened, read
from zorse_megatron.weights.torch_dist import CheckpointTensors, Written, write_checkpoint

_CHECKPOINT_VERSION = 3.0


@dataclass(frozen=True, kw_only=True)
class Imported:
    """What an import has made."""

    folder: Path
    """For Megatron's `--pretrained-checkpoint`."""
    flags: tuple[str, ...]
    """Megatron's, that build the model, its tokenizer's among them."""
    notes: tuple[str, ...]
    num_parameters: int


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What an export has made."""

    files: tuple[Path, ...]
    notes: tuple[str, ...]


def import_model(source: Path, folder: Path) -> Imported:
    """Write the weights of a Hugging Face model as a checkpoint that Megatron's `--load` takes.

    Raises ModelError with all that is wrong with the source, before anything is written, and
    OutputError where the checkpoint cannot be written: nothing of it is left then.
    """
    description = describe(source)
    files = ModelFiles(description)
    tensors = description.tensors()
    release = Checkpoint(root=folder, iteration=0, is_release=True)
    flags = (*description.model.flags, *_layer_flags(description), *_vocabulary_flags(description))
    with all_or_nothing(folder, "CHECKPOINT", last=TRACKER):
        release.folder.mkdir()
        write_checkpoint(
            release.folder,
            [_written(each, files) for each in tensors],
            common=_common(description),
            modules=stateful_modules(description.model.shape),
        )
        written = sorted(path for path in release.folder.iterdir() if path.is_file())
        write_manifest(release.folder, {path.name: file_record(path) for path in written})
        write_text(folder / TRACKER, "release")
    return Imported(
        folder=folder,
        flags=flags,
        notes=description.model.notes,
        num_parameters=sum(each.num_elements for each in tensors),
    )


def export_model(
    checkpoint: Path,
    folder: Path,
    *,
    source: Path,
    dtype: str | None = None,
    shard_bytes: int = 5 * 10**9,
    merge: Path | None = None,
) -> Exported:
    """Write a checkpoint's weights as a Hugging Face model, with `source`'s files beside them.

    `checkpoint`: what Megatron's `--save` was given, or one iteration's folder in it. `merge`: the
    same of the weights to which its adapters are added. Raises ModelError, CheckpointError with all
    that does not fit, before anything is written, and OutputError where the model cannot be
    written: nothing of it is left then.
    """
    description = describe(source)
    if problems := unreadable_companions(source):
        raise ModelError(f"The files of {source} cannot be copied", problems)
    found, adapters = _weights(checkpoint, merge, description)
    tensors = description.tensors()
    own = IN_FILES[description.dtype] if description.dtype else found.dtype(tensors[0])
    wanted = own if dtype is None else DTYPES[dtype]
    parts = [part for each in tensors for part in each.parts]
    types = _types(tensors, found, wanted)
    with all_or_nothing(folder, "DIR", last=CONFIG):
        weights = _parts_of(tensors, found, types, adapters)
        written = write_model(folder, parts, weights, types=types, shard_bytes=shard_bytes)
        written += copy_companions(source, folder, wanted)
    return Exported(files=tuple(written), notes=tuple(_left_out(tensors, found)))


def export_adapter(
    checkpoint: Path, folder: Path, *, source: Path, dtype: str | None = None
) -> Exported:
    """Write a checkpoint's adapters as files of the peft library. Arguments and errors as above."""
    description = describe(source)
    problems: list[Problem] = []
    adapters = None
    with _noted(problems):
        found = opened(iteration_folder(checkpoint))
        adapters = read_adapters(found, description, problems)
    if adapters is None:
        raise CheckpointError(_not_exported(source), problems)
    tensors = list(adapters.tensors.values())
    wanted = found.dtype(tensors[0]) if dtype is None else DTYPES[dtype]
    weights, config = (folder / name for name in (lora_files.WEIGHTS, lora_files.CONFIG))
    with all_or_nothing(folder, "DIR", last=config.name):
        parts = [part for each in tensors for part in each.parts]
        types = _types(tensors, found, wanted)
        write_tensors(weights, parts, _parts_of(tensors, found, types), types)
        write_text(config, adapters.config(source))
    initial = f"the adapters belong to initial weights of seed {adapters.seed}, not to {source}"
    notes = () if adapters.seed is None else (initial,)
    return Exported(files=(weights, config), notes=notes)


def joined(tensor: WholeTensor, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Put a tensor together from its parts."""
    if len(parts) == 1:
        return parts[0]
    rest = tensor.shape[1:]
    grouped = [part.reshape(tensor.groups, -1, *rest) for part in parts]
    return torch.cat(grouped, dim=1).reshape(tensor.shape)


def taken_apart(tensor: WholeTensor, value: torch.Tensor) -> list[torch.Tensor]:
    """Return a tensor's parts, the inverse of `joined`."""
    grouped = value.reshape(tensor.groups, -1, *tensor.shape[1:])
    rows = [part.shape[0] // tensor.groups for part in tensor.parts]
    pieces = grouped.split(rows, dim=1)
    return [piece.reshape(part.shape) for piece, part in zip(pieces, tensor.parts, strict=True)]


def _written(tensor: WholeTensor, files: ModelFiles) -> Written:
    def make() -> torch.Tensor:
        whole = joined(tensor, [files.read(part.name) for part in tensor.parts])
        return whole.reshape(*(1 for _ in tensor.place), *whole.shape)

    return Written(tensor=tensor, dtype=files.dtype(tensor.parts[0].name), make=make)


def _weights(
    checkpoint: Path, merge: Path | None, description: Description
) -> tuple[CheckpointTensors, Adapters | None]:
    """Return the tensors of a model, and the adapters to add. Raises CheckpointError."""
    problems: list[Problem] = []
    found = adapters = None
    if merge is not None:
        with _noted(problems):
            saved = opened(iteration_folder(checkpoint))
            adapters = read_adapters(saved, description, problems)
    with _noted(problems):
        found = opened(iteration_folder(merge or checkpoint))
        if holds_adapters(found):
            problems.append(_only_adapters(found, is_base=merge is not None))
        else:
            problems += misfits(found, description.tensors(), by="config.json")
            problems += other_base(adapters, found.folder) if adapters else ()
    if problems or found is None:
        raise CheckpointError(_not_exported(description.folder), problems)
    return found, adapters


@contextmanager
def _noted(problems: list[Problem]) -> Iterator[None]:
    """Note what keeps a checkpoint from being read, so that others are looked at, too."""
    try:
        yield
    except CheckpointError as error:
        problems += error.problems


def _not_exported(source: Path) -> str:
    return f"The checkpoint cannot be exported as {source}'s model"


def _only_adapters(found: CheckpointTensors, *, is_base: bool) -> Problem:
    return Problem(
        where=str(found.folder),
        found="adapters of LoRA alone",
        expected="the weights of the whole model",
        remedy="Give --merge what the run had as --pretrained-checkpoint."
        if is_base
        else "Write the adapters with --adapter, or add them to a model's weights: --merge BASE.",
    )


def _types(
    tensors: Sequence[WholeTensor], found: CheckpointTensors, wanted: torch.dtype
) -> dict[str, torch.dtype]:
    """Part -> the type to write it in: what may be in fp32 stays so."""
    return {
        part.name: torch.float32
        if part.may_be_fp32 and found.dtype(each) == torch.float32
        else wanted
        for each in tensors
        for part in each.parts
    }


def _parts_of(
    tensors: Sequence[WholeTensor],
    found: CheckpointTensors,
    types: Mapping[str, torch.dtype],
    adapters: Adapters | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    for tensor in tensors:
        pieces = taken_apart(tensor, read(found, tensor))
        for part, piece in zip(tensor.parts, pieces, strict=True):
            change = adapters.change(part.name) if adapters else None
            value = piece if change is None else piece.float() + change
            cast = value.to(types[part.name])
            if cast.dtype == torch.float16 and not torch.equal(cast.isfinite(), value.isfinite()):
                problem = Problem(
                    where=part.name,
                    found=f"a weight of {value.abs().max().item():g}",
                    expected="at most 65504, the largest number of fp16",
                    remedy="Export it in bf16 or fp32 (--dtype).",
                )
                raise OutputError("the model cannot be written in fp16", [problem])
            yield part.name, cast


def _left_out(tensors: Sequence[WholeTensor], found: CheckpointTensors) -> Iterator[str]:
    """Say what is not exported: Megatron's padding, if `vocab_size` of the source is right."""
    for tensor in tensors:
        shape = found.found(tensor)
        if tensor.is_padded and shape is not None and shape[0] > tensor.shape[0]:
            yield (
                f"{shape[0] - tensor.shape[0]} rows of {tensor.key} are left out: "
                f"by config.json, vocab_size is {tensor.shape[0]}"
            )


def _common(description: Description) -> dict[str, Any]:
    return {
        "args": Namespace(**_arguments(description.model.flags)),
        "checkpoint_version": _CHECKPOINT_VERSION,
        "iteration": 0,
        "content_metadata": {"singleton_local_shards": False, "chained_optim_avoid_prefix": True},
    }


def _arguments(flags: Sequence[str]) -> dict[str, Any]:
    """Return Megatron's arguments of flags, as `--use-checkpoint-args` takes them."""
    values: dict[str, Any] = {
        "add_bias_linear": "--disable-bias-linear" not in flags,
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "consumed_train_samples": 0,
        "consumed_valid_samples": 0,
        "skipped_train_samples": 0,
        "add_position_embedding": True,
    }
    for flag, after in zip(flags, (*flags[1:], "--"), strict=True):
        if flag.startswith("--") and flag != "--disable-bias-linear":
            name = flag.removeprefix("--").replace("-", "_")
            values[name] = True if after.startswith("--") else _number(after)
    return values


def _number(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def _layer_flags(description: Description) -> tuple[str, ...]:
    """Transformer Engine's layers ask for other tensors than Megatron's own beside experts."""
    shape = description.model.shape
    # Of latent attention there are those of Transformer Engine alone.
    is_local = shape.experts is not None and shape.latent is None
    return ("--transformer-impl", "local") if is_local else ()


def _vocabulary_flags(description: Description) -> tuple[str, ...]:
    """Megatron sizes the table by the tokenizer, which may have fewer tokens than it has rows."""
    rows = ("--padded-vocab-size", str(description.model.shape.vocab_size))
    files = [description.folder / name for name in ("tokenizer.json", "tokenizer.model")]
    if not any(path.is_file() for path in files):
        return rows
    folder = str(description.folder)
    return (*rows, "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", folder)


# A new folder of weights: complete, or nothing of it.

_UNFINISHED = "unfinished import or export of zorse"


@contextmanager
def all_or_nothing(folder: Path, option: str, *, last: str) -> Iterator[None]:
    """Make the folder; if the block ends with an error, leave nothing in it, nor what was made.

    `last`: the file by which others know the folder, which the block replaces at its end. After
    SIGKILL it still says that the rest is unfinished: Megatron refuses such a tracker file, and
    transformers such a config.json. Raises OutputError where the folder cannot be used.
    """
    clear = partial(_clear, folder, _prepared(folder, option, last))
    try:
        (folder / last).write_text(_UNFINISHED)
        yield
    except (OSError, RuntimeError) as error:
        failure = _not_written(folder, error)  # before there is room again
        clear()
        raise failure from error
    except SafetensorError as error:
        clear()
        problem = Problem(
            where=str(folder), found=str(error), expected="tensors", remedy="Import it again."
        )
        raise ModelError("The model changed while it was read", [problem]) from error
    except BaseException:
        clear()
        raise


def _prepared(folder: Path, option: str, last: str) -> list[Path]:
    """Make the folder; the directories that there were not, from it outwards.

    Raises OutputError where it holds anything or takes no files.
    """
    made = [each for each in (folder, *folder.parents) if not each.exists()]
    problems = list(folder_problems(option, folder))
    if not problems and (names := sorted(path.name for path in folder.iterdir())):
        found, remedy = f"a directory that is not empty ({names[0]})", "Choose another path."
        if _is_unfinished(folder / last):
            found = "what an import or export that was killed, or still runs, has written"
            remedy = f"If none runs, remove it: rm -r {shlex.quote(str(folder))}"
        expected = "a new directory, or an empty one"
        where = f"{option} {folder}"
        problems.append(Problem(where=where, found=found, expected=expected, remedy=remedy))
    if problems:
        _remove(made)
        raise OutputError("the results could not be written", problems)
    return made


def _is_unfinished(path: Path) -> bool:
    with suppress(OSError):
        return path.is_file() and path.read_bytes() == _UNFINISHED.encode()
    return False


def _clear(folder: Path, made: Sequence[Path]) -> None:
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    _remove(made)


def _remove(made: Sequence[Path]) -> None:
    for each in made:
        with suppress(OSError):  # it may not be there, or others use it
            each.rmdir()


def _not_written(folder: Path, error: BaseException) -> OutputError:
    full = disk_problem(folder)
    if full is not None:
        said, disk, free_bytes, disk_bytes = full
        found = f"{said}: {free_bytes:,} of {disk_bytes:,} bytes are free on the disk {disk}"
    else:
        found = str(getattr(error, "strerror", None) or error).partition("\n")[0]
    remedy = remedy_for(error) if isinstance(error, OSError) else "Make room there."
    problem = Problem(
        where=str(folder), found=found, expected="room for all weights", remedy=remedy
    )
    return OutputError("the weights are not written", [problem])
