"""Small valid files for tests of the commands: a cluster, a model, a profile, a plan."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from tests.unit.profile_samples import good as good_profile
from zorse_megatron.cli.main import app

EXAMPLES = Path(__file__).parents[2] / "examples"
LAB_KINDS = ["A6000"] * 4 + ["V100-16"] * 4
MODEL = {
    "model_type": "starcoder2",
    "_name_or_path": "small",
    "num_hidden_layers": 8,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "vocab_size": 32000,
    "max_position_embeddings": 512,
    "use_bias": True,
    "tie_word_embeddings": False,
}
WORKLOAD = (
    *("--cluster", "cluster.yaml", "--model", "model.json"),
    *("--seq-length", "512", "--global-batch-size", "16"),
)
"""Options of a command that plans for `MODEL`."""
FLAGS_IN_ONE_TEXT = (
    "--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 512 "
    "--position-embedding-type rope --untie-embeddings-and-output-weights --vocab-size 32000 "
    "--fp16 --global-batch-size 16 --eval-interval 1000"
)
FLAGS = FLAGS_IN_ONE_TEXT.split()


def lab_plan() -> dict[str, Any]:
    """A plan for `MODEL` on the cluster of two-node-lab.yaml: 4 A6000 and 4 V100-16."""

    def group(name: str, first: int) -> dict[str, Any]:
        replica = {"micro_batch_size": 2, "num_microbatches": 2, "shard_weight": 1.0}
        replicas = [{"ranks": [rank], **replica} for rank in range(first, first + 4)]
        return {"name": name, "replicas": replicas}

    return {
        "schema_version": 2,
        "global_batch_size": 16,
        "model": {"num_layers": 8, "hidden_size": 1024, "seq_length": 512},
        "groups": [group("new", 0), group("old", 4)],
        "chunks": [{"group": 0, "layers": [0, 5]}, {"group": 1, "layers": [5, 8]}],
        "schedule": {"name": "1f1b"},
        "cluster": {"name": "two-node lab", "gpu_kinds": LAB_KINDS},
    }


def write_lab(directory: Path) -> None:
    """Write cluster.yaml, model.json, profile.json and plan.json, which go together."""
    shutil.copy(EXAMPLES / "two-node-lab.yaml", directory / "cluster.yaml")
    (directory / "model.json").write_text(json.dumps(MODEL))
    (directory / "profile.json").write_text(json.dumps(good_profile()))
    (directory / "plan.json").write_text(json.dumps(lab_plan()))


def runner_in(directory: Path, monkeypatch: Any) -> Callable[..., Any]:
    """Write the files and return what runs `zorse` beside them."""
    monkeypatch.chdir(directory)
    write_lab(directory)
    return lambda *arguments: CliRunner().invoke(app, [str(each) for each in arguments])


def cells(output: str) -> list[list[str]]:
    """The rows of the tables in an output."""
    rows = [line.split("│")[1:-1] for line in output.splitlines() if "│" in line]
    return [[cell.strip() for cell in row] for row in rows]
