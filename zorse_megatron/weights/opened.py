"""Checkpoints to read: where they are, whether their tensors are those that are wanted, which
weights they hold."""

import hashlib
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from zorse_megatron.errors import CheckpointError, Problem
from zorse_megatron.inputs.lora import is_adapter
from zorse_megatron.live.checkpoint_files import checkpoints_in, read_tracker
from zorse_megatron.weights.names import WholeTensor
from zorse_megatron.weights.torch_dist import CheckpointTensors

CANNOT = "The checkpoint cannot be read"
_DAMAGED = "See which is damaged: zorse checkpoint verify."
_MOST_SAID = 8
"""Of what has other bytes than its own: in a file that is cut off, there may be thousands."""
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
    raise CheckpointError.of(
        CANNOT,
        where=str(checkpoint),
        found=f"no latest torch_dist checkpoint{f' ({newest[0]} exists)' if newest else ''}",
        expected="the directory given to --save, or that of one iteration",
        remedy="Correct the path.",
    )


def opened(folder: Path) -> CheckpointTensors:
    """Return the tensors of an iteration's folder. Raises CheckpointError."""
    try:
        return CheckpointTensors(folder)
    except Exception as error:  # of a damaged index, whatever unpickling raises
        raise CheckpointError.of(
            CANNOT,
            where=str(folder / ".metadata"),
            found=f"{type(error).__name__}: {error}",
            expected="the index of a torch_dist checkpoint",
            remedy="See whether it is whole: zorse checkpoint verify.",
        ) from error


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
        raise CheckpointError.of(
            CANNOT,
            where=f"{folder}: {key}",
            found=f"{type(error).__name__}: {str(error)[:200]}",
            expected="files as they were saved",
            remedy=_DAMAGED,
        ) from error


def read(found: CheckpointTensors, tensor: WholeTensor) -> torch.Tensor:
    """Read a tensor of a checkpoint. Raises CheckpointError for a damaged file."""
    with reading(found.folder, tensor.key):
        return found.read(tensor)


def misfits(
    found: CheckpointTensors, tensors: Sequence[WholeTensor], *, by: str
) -> Iterator[Problem]:
    """Yield once what a checkpoint has not of these tensors, or beside them, and what is damaged.

    `by`: who says so.
    """
    there = {each.key for each in tensors if found.found(each) is not None}
    seen = [_misfit(found, tensor, by, in_others=tensor.key in there) for tensor in tensors]
    seen += [_surplus(found, name, by) for name in found.others(tensors)]
    yield from {str(each): each for each in seen if each is not None}.values()
    with reading(found.folder, ".metadata"):
        misplaced = list(islice(found.misplaced(), _MOST_SAID))
    for key, span in misplaced:
        yield Problem(
            where=f"{found.folder / '.metadata'}: {key}",
            found=span,
            expected="bytes of its own, all of them in the file",
            remedy=_DAMAGED,
        )


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


# What identifies the checkpoint that adapters were trained upon.

_LAYER = re.compile(r"decoder\.layers\.((\d+)\.)?")
_TABLES = ("embedding.", "output_layer.")
_ROWS, _WIDTH = 64, 64
_GOLDEN, _SILVER = (5**0.5 - 1) / 2, 2**0.5 - 1
# Those of a table end in padding, of which layouts have more or less.
_TABLE_ROWS = 8
# Layers with norms of their own have other names for them, which Megatron maps to these. Source:
# `sharded_state_dict_keys_map` in its `gpt_layer_specs.py`.
_FUSED = {
    "decoder.layers.input_layernorm.": "decoder.layers.self_attention.linear_qkv.layer_norm_",
    "decoder.layers.pre_mlp_layernorm.": "decoder.layers.mlp.linear_fc1.layer_norm_",
}


def base_digest(folder: Path) -> str:
    """Return a digest of the weights in an iteration's folder.

    It is the same however files, layers and padding are laid out: SHA-256 of names, shapes and
    some elements of each layer's tensors, in fp32. Raises CheckpointError.
    """
    found = opened(folder)
    pieces = sorted(piece for key, size in found.sizes().items() if not is_adapter(key)
                    for piece in _pieces(found, key, size))  # fmt: skip
    if not pieces:
        raise CheckpointError.of(
            CANNOT,
            where=str(folder),
            found="no weights of a model",
            expected="a checkpoint that training can start from",
            remedy="Give the one that holds the whole model.",
        )
    digest = hashlib.sha256()
    for name, layer, shape, values in pieces:
        digest.update(f"{name} {layer} {shape} {len(values)}\n".encode() + values)
    return digest.hexdigest()


def _pieces(
    found: CheckpointTensors, key: str, size: tuple[int, ...]
) -> Iterator[tuple[str, int, tuple[int, ...], bytes]]:
    """Yield name, layer, shape and some elements of a tensor, of each layer where it is stacked.

    The layer is -1 outside layers, the shape of a table without its rows.
    """
    in_layer = _LAYER.match(key)
    is_stacked = in_layer is not None and in_layer[1] is None
    layer = -1 if in_layer is None else int(in_layer[2] or 0)
    shape = size[1:] if is_stacked else size
    is_table = key.startswith(_TABLES)
    blocks = [((0, 0), (min(_TABLE_ROWS, shape[0]), shape[1]))] if is_table else _blocks(shape)
    for number in range(size[0]) if is_stacked else (0,):
        lead = (number,) if is_stacked else ()
        with reading(found.folder, key):
            values = [
                found.read_box(key, (*lead, *offsets), (*(1 for _ in lead), *sizes)).float()
                for offsets, sizes in blocks
            ]
        yield (
            _name(key),
            layer + number,
            shape[1:] if is_table else shape,
            torch.cat([each.flatten() for each in values]).numpy().tobytes(),
        )


def _blocks(shape: tuple[int, ...]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Offsets and sizes of what is looked at: all of a vector, pieces of rows of a matrix.

    Rows by the golden section: of a fused matrix some are of each part, and of all groups together.
    """
    if len(shape) != 2:
        return [((0,) * len(shape), shape)]
    rows, columns = shape
    width, others = min(_WIDTH, columns), columns - min(_WIDTH, columns)
    return [
        ((int(rows * (n * _GOLDEN % 1)), int(others * (n * _SILVER % 1))), (1, width))
        for n in range(_ROWS)
    ]


def _name(key: str) -> str:
    """Return the key as stacked layers of Transformer Engine have it."""
    name = _LAYER.sub("decoder.layers.", key, count=1)
    for own, fused in _FUSED.items():
        name = name.replace(own, fused)
    return name
