"""`zorse import-hf` and `export-hf`: whole models, tensor by tensor, complete or not at all."""

import shlex
import shutil
from argparse import Namespace
from collections.abc import Iterator, Sequence
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
    checkpoints_in,
    file_record,
    read_tracker,
    write_manifest,
)
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
)
from zorse_megatron.weights.names import WholeTensor, stateful_modules
from zorse_megatron.weights.torch_dist import CheckpointTensors, Written, write_checkpoint

_CHECKPOINT_VERSION = 3.0
_UNFINISHED = "unfinished import or export of zorse"


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
    flags = (*description.model.flags, *_vocabulary_flags(description))
    with _all_or_nothing(folder, "CHECKPOINT", last=TRACKER):
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
    checkpoint: Path, folder: Path, *, source: Path, dtype: str | None, shard_bytes: int
) -> Exported:
    """Write a checkpoint's weights as a Hugging Face model, with `source`'s files beside them.

    `checkpoint`: what Megatron's `--save` was given, or one iteration's folder in it. Raises
    ModelError, CheckpointError with all that does not fit, before anything is written, and
    OutputError where the model cannot be written: nothing of it is left then.
    """
    description = describe(source)
    if problems := unreadable_companions(source):
        raise ModelError(f"The files of {source} cannot be copied", problems)
    found = _opened(_iteration_of(checkpoint), description)
    tensors = description.tensors()
    own = IN_FILES[description.dtype] if description.dtype else found.dtype(tensors[0])
    wanted = own if dtype is None else DTYPES[dtype]
    parts = [part for each in tensors for part in each.parts]
    with _all_or_nothing(folder, "DIR", last=CONFIG):
        weights = _parts_of(tensors, found, wanted)
        written = write_model(folder, parts, weights, dtype=wanted, shard_bytes=shard_bytes)
        written += copy_companions(source, folder, wanted)
    return Exported(files=tuple(written), notes=tuple(_left_out(tensors, found)))


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
        return whole if tensor.layer is None else whole.unsqueeze(0)

    return Written(tensor=tensor, dtype=files.dtype(tensor.parts[0].name), make=make)


def _parts_of(
    tensors: Sequence[WholeTensor], found: CheckpointTensors, dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    for tensor in tensors:
        value = _read(found, tensor)
        cast = value.to(dtype)
        if dtype == torch.float16 and not torch.equal(cast.isfinite(), value.isfinite()):
            problem = Problem(
                where=tensor.key if tensor.layer is None else tensor.key_of_layer,
                found=f"a weight of {value.abs().max().item():g}",
                expected="at most 65504, the largest number of fp16",
                remedy="Export it in bf16 or fp32 (--dtype).",
            )
            raise OutputError("the model cannot be written in fp16", [problem])
        for part, piece in zip(tensor.parts, taken_apart(tensor, cast), strict=True):
            yield part.name, piece


def _left_out(tensors: Sequence[WholeTensor], found: CheckpointTensors) -> Iterator[str]:
    """Say what is not exported: Megatron's padding, if `vocab_size` of the source is right."""
    for tensor in tensors:
        shape = found.found(tensor)
        if tensor.is_padded and shape is not None and shape[0] > tensor.shape[0]:
            yield (
                f"{shape[0] - tensor.shape[0]} rows of {tensor.key} are left out: "
                f"by config.json, vocab_size is {tensor.shape[0]}"
            )


def _read(found: CheckpointTensors, tensor: WholeTensor) -> torch.Tensor:
    """Read a tensor of a checkpoint. Raises CheckpointError for a damaged file."""
    try:
        return found.read(tensor)
    except Exception as error:  # whatever unpickling raises
        problem = Problem(
            where=f"{found.folder}: {tensor.key}",
            found=f"{type(error).__name__}: {str(error)[:200]}",
            expected="files as they were saved",
            remedy="See which is damaged: zorse checkpoint verify.",
        )
        raise CheckpointError("The checkpoint cannot be exported", [problem]) from error


def _iteration_of(checkpoint: Path) -> Path:
    """Return the folder with the files. Raises CheckpointError."""
    if (checkpoint / ".metadata").is_file():
        return checkpoint
    names = read_tracker(checkpoint).names if checkpoint.is_dir() else None
    if names is not None and (names.folder / ".metadata").is_file():
        return names.folder
    newest = [each.folder.name for each in checkpoints_in(checkpoint)]
    problem = Problem(
        where=str(checkpoint),
        found=f"no latest torch_dist checkpoint{f' ({newest[0]} exists)' if newest else ''}",
        expected="the directory given to --save, or that of one iteration",
        remedy="Correct the path.",
    )
    raise CheckpointError("The checkpoint cannot be exported", [problem])


def _opened(folder: Path, description: Description) -> CheckpointTensors:
    """Return a checkpoint's tensors. Raises CheckpointError with all that are not the model's."""
    try:
        found = CheckpointTensors(folder)
    except Exception as error:  # of a damaged index, whatever unpickling raises
        problem = Problem(
            where=str(folder / ".metadata"),
            found=f"{type(error).__name__}: {error}",
            expected="the index of a torch_dist checkpoint",
            remedy="See whether it is whole: zorse checkpoint verify.",
        )
        raise CheckpointError("The checkpoint cannot be exported", [problem]) from error
    tensors = description.tensors()
    misfits = [_misfit(folder, tensor, found) for tensor in tensors]
    misfits += [_surplus(folder, name) for name in found.others(tensors)]
    if problems := {str(each): each for each in misfits if each is not None}:
        title = f"The checkpoint is not of {description.folder}'s model"
        raise CheckpointError(title, list(problems.values()))
    return found


def _misfit(folder: Path, tensor: WholeTensor, found: CheckpointTensors) -> Problem | None:
    shape = found.found(tensor)
    if shape is None:
        seen = "no such tensor"
    elif tensor.layer is not None and found.layers(tensor) not in (None, tensor.num_layers):
        seen = f"{found.layers(tensor)} layers"
    elif shape == tensor.shape or (
        tensor.is_padded and shape[1:] == tensor.shape[1:] and shape[0] > tensor.shape[0]
    ):
        return None
    else:
        seen = f"{shape}"
    layers = f" in each of {tensor.num_layers} layers" if tensor.layer is not None else ""
    return Problem(
        where=f"{folder}: {tensor.key}",
        found=seen,
        expected=f"{tensor.shape}{layers}, by config.json",
        remedy="Give the folder of the model that was trained (--source).",
    )


def _surplus(folder: Path, name: str) -> Problem:
    """A tensor that an export would lose."""
    return Problem(
        where=f"{folder}: {name}",
        found="a tensor that the model of config.json has not",
        expected="those of that model alone",
        remedy="Give the folder of the model that was trained (--source).",
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


def _vocabulary_flags(description: Description) -> tuple[str, ...]:
    """Megatron sizes the table by the tokenizer, which may have fewer tokens than it has rows."""
    rows = ("--padded-vocab-size", str(description.model.shape.vocab_size))
    files = [description.folder / name for name in ("tokenizer.json", "tokenizer.model")]
    if not any(path.is_file() for path in files):
        return rows
    folder = str(description.folder)
    return (*rows, "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", folder)


@contextmanager
def _all_or_nothing(folder: Path, option: str, *, last: str) -> Iterator[None]:
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
