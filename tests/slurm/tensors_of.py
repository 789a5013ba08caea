"""The tensors of a checkpoint in one file: `python -m tests.slurm.tensors_of CHECKPOINT FILE`.

In a process of its own, as what Megatron has pickled there imports Megatron.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save


def main(checkpoint: str, file: str) -> None:
    """Write name -> tensor: parameters and the optimizer's state."""
    with tempfile.TemporaryDirectory() as directory:
        whole = Path(directory) / "whole.pt"
        dcp_to_torch_save(checkpoint, whole)
        content = torch.load(whole, weights_only=False)
    found: dict[str, torch.Tensor] = {}

    def collect(value: Any, name: str) -> None:
        if isinstance(value, torch.Tensor):
            found[name] = value
        elif isinstance(value, dict):
            for key, inner in value.items():
                collect(inner, f"{name}.{key}")

    collect(content, "")
    torch.save(found, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
