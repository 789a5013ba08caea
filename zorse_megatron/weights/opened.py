"""Checkpoints to read: where they are, and whether their tensors are those that are wanted."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from zorse_megatron.errors import CheckpointError, Problem
from zorse_megatron.live.checkpoint_files import checkpoints_in, read_tracker
from zorse_megatron.weights.names import WholeTensor
from zorse_megatron.weights.torch_dist import CheckpointTensors

CANNOT = "The checkpoint cannot be read"
_SOURCE = "Give the folder of the model that was trained (--source)."


def iteration_folder(checkpoint: Path) -> Path:
    """Return the folder with the files of a directory of `--save`, or of one iteration in it.

    Raises CheckpointError.
    """
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
    raise CheckpointError(CANNOT, [problem])


def opened(folder: Path) -> CheckpointTensors:
    """Return the tensors of an iteration's folder. Raises CheckpointError."""
    try:
        return CheckpointTensors(folder)
    except Exception as error:  # of a damaged index, whatever unpickling raises
        problem = Problem(
            where=str(folder / ".metadata"),
            found=f"{type(error).__name__}: {error}",
            expected="the index of a torch_dist checkpoint",
            remedy="See whether it is whole: zorse checkpoint verify.",
        )
        raise CheckpointError(CANNOT, [problem]) from error


def argument_in(folder: Path, name: str) -> Any:
    """Return an argument of the run that saved an iteration's folder; None: it had none.

    Raises CheckpointError.
    """
    found = opened(folder)
    with reading(folder, "common_state"):
        return vars(found.common()["args"]).get(name)


@contextmanager
def reading(folder: Path, key: str) -> Iterator[None]:
    """Raise CheckpointError for a damaged file."""
    try:
        yield
    except Exception as error:  # whatever unpickling raises
        problem = Problem(
            where=f"{folder}: {key}",
            found=f"{type(error).__name__}: {str(error)[:200]}",
            expected="files as they were saved",
            remedy="See which is damaged: zorse checkpoint verify.",
        )
        raise CheckpointError(CANNOT, [problem]) from error


def read(found: CheckpointTensors, tensor: WholeTensor) -> torch.Tensor:
    """Read a tensor of a checkpoint. Raises CheckpointError for a damaged file."""
    with reading(found.folder, tensor.key):
        return found.read(tensor)


def misfits(
    found: CheckpointTensors, tensors: Sequence[WholeTensor], *, by: str
) -> Iterator[Problem]:
    """Yield once what a checkpoint has not of these tensors, or beside them. `by`: who says so."""
    there = {each.key for each in tensors if found.found(each) is not None}
    seen = [_misfit(found, tensor, by, in_others=tensor.key in there) for tensor in tensors]
    seen += [_surplus(found, name, by) for name in found.others(tensors)]
    yield from {str(each): each for each in seen if each is not None}.values()


def _misfit(
    found: CheckpointTensors, tensor: WholeTensor, by: str, *, in_others: bool
) -> Problem | None:
    """`in_others`: whether another layer has the tensor."""
    shape, wanted = found.found(tensor), tensor.stack
    there = {} if shape is None else found.stack(tensor)
    if shape is None:
        seen = "no such tensor"
    elif wrong := [f"{size} {axis}" for axis, size in there.items() if size != wanted[axis]]:
        seen = ", ".join(wrong)
    elif shape == tensor.shape or (
        tensor.is_padded and shape[1:] == tensor.shape[1:] and shape[0] > tensor.shape[0]
    ):
        return None
    else:
        seen = f"{shape}"
    each = "".join(f" in each of {size} {axis}" for axis, size in reversed(wanted.items()))
    key = tensor.keys_of_layer[0] if shape is None and in_others else tensor.key
    return Problem(
        where=f"{found.folder}: {key}",
        found=seen,
        expected=f"{tensor.shape}{each}, by {by}",
        remedy=_SOURCE,
    )


def _surplus(found: CheckpointTensors, name: str, by: str) -> Problem:
    """A tensor that an export would lose."""
    return Problem(
        where=f"{found.folder}: {name}",
        found="a tensor that would be left out",
        expected=f"those by {by} alone",
        remedy=_SOURCE,
    )
