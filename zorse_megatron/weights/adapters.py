"""Adapters in the checkpoint of a run with `--zorse-lora`, and the same as files of peft's.

Source of the files: `LoraConfig` and `get_peft_model_state_dict` in the peft library.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from zorse_megatron.errors import Problem
from zorse_megatron.inputs.lora import (
    ARGUMENT,
    LORA_FLAG,
    RANDOM_BASE,
    Lora,
    is_adapter,
    parse_lora,
)
from zorse_megatron.weights.model_folder import Description
from zorse_megatron.weights.names import (
    MODULES,
    WholeTensor,
    adapter_tensors,
    names_of_adapter,
)
from zorse_megatron.weights.opened import argument_in, base_digest, misfits, read
from zorse_megatron.weights.torch_dist import CheckpointTensors

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
_AS_SAVED = "Take a checkpoint as the run has saved it."
# Digits of a digest that people are shown.
_SHOWN = 12


@dataclass(frozen=True, kw_only=True)
class Adapters:
    """All adapters of a model, in a checkpoint."""

    found: CheckpointTensors
    lora: Lora
    base: str
    """Digest of the checkpoint that they were trained upon, or `random:` and a seed."""
    tensors: Mapping[str, WholeTensor]
    """By their names in peft's files."""

    @property
    def seed(self) -> str | None:
        """Return the seed of the initial weights that they were trained upon; None: of others."""
        return self.base.removeprefix(RANDOM_BASE) if self.base.startswith(RANDOM_BASE) else None

    def change(self, weight: str) -> torch.Tensor | None:
        """Return what is added to a tensor of the Hugging Face model, in fp32; None: nothing.

        Raises CheckpointError for a damaged file.
        """
        sides = [self.tensors.get(name) for name in names_of_adapter(weight)]
        if sides[0] is None or sides[1] is None:
            return None
        a, b = (read(self.found, side).float() for side in sides if side is not None)
        return (b @ a) * self.lora.scale

    def config(self, source: Path) -> str:
        """Return the text of peft's configuration."""
        alpha = self.lora.alpha
        value = {
            "base_model_name_or_path": str(source),
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
            "lora_alpha": int(alpha) if alpha.is_integer() else alpha,
            "lora_dropout": 0.0,
            "peft_type": "LORA",
            "r": self.lora.rank,
            "target_modules": [MODULES[each].rpartition(".")[2] for each in self.lora.targets],
            "task_type": "CAUSAL_LM",
        }
        return json.dumps(value, indent=2) + "\n"


def holds_adapters(found: CheckpointTensors) -> bool:
    """Say whether a checkpoint is of a run with adapters."""
    return any(map(is_adapter, found.sizes()))


def read_adapters(
    found: CheckpointTensors, description: Description, problems: list[Problem]
) -> Adapters | None:
    """Look at a checkpoint's adapters; None where problems have been noted.

    Raises CheckpointError where it cannot be read.
    """
    if not holds_adapters(found):
        problems.append(
            Problem(
                where=str(found.folder),
                found="no adapters",
                expected=f"what a run with {LORA_FLAG} has saved",
                remedy="Leave out --adapter and --merge for the checkpoint of a whole model.",
            )
        )
        return None
    value = argument_in(found.folder, ARGUMENT)
    lora = _lora(value, problems, where=f"{found.folder}: {ARGUMENT} of its arguments")
    if lora is None:
        return None
    tensors = list(adapter_tensors(lora, description.model.shape))
    wrong = list(misfits(found, tensors, by=f"config.json and the run's {ARGUMENT}"))
    problems += wrong
    named = {each.parts[0].name: each for each in tensors}
    return None if wrong else Adapters(found=found, lora=lora, base=value["base"], tensors=named)


def other_base(adapters: Adapters, folder: Path) -> Iterator[Problem]:
    """Yield what is wrong if the adapters were trained upon other weights than a folder's.

    Raises CheckpointError.
    """
    digest = base_digest(folder)
    if digest == adapters.base:
        return
    seed = adapters.seed
    wanted = f"{adapters.base[:_SHOWN]}..." if seed is None else f"initial ones of seed {seed}"
    yield Problem(
        where=str(folder),
        found=f"weights with the digest {digest[:_SHOWN]}...",
        expected=f"those that {adapters.found.folder} was trained upon: {wanted}",
        remedy="Give what that run had as --pretrained-checkpoint."
        if seed is None
        else "Train adapters upon a checkpoint: initial weights are in none.",
    )


def _lora(value: Any, problems: list[Problem], *, where: str) -> Lora | None:
    """Read what the run kept of its adapters beside their tensors."""
    if not (
        isinstance(value, dict)
        and all(key in value for key in ("rank", "alpha", "targets"))
        and isinstance(value["targets"], list | tuple)
        and isinstance(value.get("base"), str)
    ):
        found = "nothing" if value is None else repr(value)[:100]
        expected = "rank, alpha, targets and base"
        problems.append(Problem(where=where, found=found, expected=expected, remedy=_AS_SAVED))
        return None
    targets = ",".join(map(str, value["targets"]))
    text = f"rank={value['rank']},alpha={value['alpha']},targets={targets}"
    wrong: list[Problem] = []
    lora = parse_lora(text, wrong, where=where)
    problems += [replace(each, remedy=_AS_SAVED) for each in wrong]
    return lora
