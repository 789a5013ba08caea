"""What is read of a checkpoint's index about the experts of its model."""

import pickle
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties, TensorStorageMetadata

from zorse_megatron.live.checkpoint_choice import SavedExperts, other_experts

LAYERS = "decoder.layers"
EXPERTS = "mlp.experts.experts.linear_fc2.weight"
DENSE = "mlp.linear_fc2.weight"
MODEL = SavedExperts.in_layers((0, 1, 1), 4, 48)
ALONE = {f"{LAYERS}.{layer}.{EXPERTS}": (4, 32, 48) for layer in (1, 2)}


def write_index(folder: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    tensors = {
        name: TensorStorageMetadata(
            properties=TensorProperties(), size=torch.Size(shape), chunks=[]
        )
        for name, shape in shapes.items()
    }
    (folder / ".metadata").write_bytes(pickle.dumps(Metadata(tensors)))


@pytest.mark.parametrize(
    ("shapes", "expected", "found"),
    [
        ({f"{LAYERS}.0.{DENSE}": (32, 64), **ALONE}, MODEL, None),
        ({f"{LAYERS}.{EXPERTS}": (3, 4, 32, 48)}, MODEL, "4 experts of width 48 in layers 0 to 2"),
        (ALONE, None, "4 experts of width 48 in layers 1 to 2"),
        ({f"{LAYERS}.{DENSE}": (3, 32, 64)}, MODEL, "no experts"),
        ({f"{LAYERS}.{DENSE}": (3, 32, 64)}, None, None),
        # Of other kinds, which loading tells: adapters alone, and experts as others save them.
        ({f"{LAYERS}.0.self_attention.linear_qkv.lora.q.a": (4, 32)}, MODEL, None),
        ({f"{LAYERS}.0.{EXPERTS}": (32, 48)}, MODEL, None),
        (
            {f"{LAYERS}.0.{DENSE}": (32, 64), f"{LAYERS}.1.mlp.experts.experts.0.w": (3,)},
            MODEL,
            None,
        ),
        ({f"{LAYERS}.{layer}.{EXPERTS}": (4 + layer, 32, 48) for layer in (1, 2)}, MODEL, None),
        ({}, MODEL, None),
    ],
)
def test_other_experts_are_told(
    shapes: dict[str, tuple[int, ...]],
    expected: SavedExperts | None,
    found: str | None,
    tmp_path: Path,
) -> None:
    write_index(tmp_path, shapes)
    problem = other_experts(tmp_path, expected)
    assert (problem and problem.found) == found
    if problem is not None:
        assert problem.expected == f"{expected or 'no experts'}, as the command has"


def test_a_folder_without_an_index_is_left_to_loading(tmp_path: Path) -> None:
    assert other_experts(tmp_path, MODEL) is None
    (tmp_path / ".metadata").write_bytes(b"cut")
    assert other_experts(tmp_path, MODEL) is None
