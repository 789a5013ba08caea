"""One rank's state as bytes, and what several ranks' bytes are to the rank that reads them."""

import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from zorse_megatron.adapter.moving.state import SetAside
from zorse_megatron.runtime.state_transfer import Held, HeldBlock
from zorse_megatron.schema.plan.plan import ComputeDtype


@dataclass(frozen=True, kw_only=True)
class MirroredState:
    """What a copy has."""

    aside: SetAside
    dtypes: tuple[ComputeDtype, ...]
    """What there is among the job's groups to compute in, in order."""


def packed(state: MirroredState) -> memoryview:
    """The bytes of a copy."""
    file = io.BytesIO()
    # What is set aside may be views: torch would write all that they are parts of.
    held: Held = {
        name: [
            HeldBlock(
                block=each.block,
                values=tuple(
                    value.clone(memory_format=torch.contiguous_format) for value in each.values
                ),
            )
            for each in blocks
        ]
        for name, blocks in state.aside.held.items()
    }
    torch.save(replace(state, aside=replace(state.aside, held=held)), file)
    return file.getbuffer()


def unpacked(data: bytes) -> MirroredState:
    """The copy of these bytes, in host memory; from a file of this user's own only."""
    found = torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)
    assert isinstance(found, MirroredState)
    return found


def joined(asides: Sequence[SetAside], first: SetAside) -> SetAside:
    """What one rank brings that has read these; `first`: of any rank, says where training is.

    The time from which `--exit-duration-in-mins` counts is not among it: that is each start's own.
    """
    held: Held = {}
    for aside in asides:
        for name, blocks in aside.held.items():
            there = held.setdefault(name, [])
            # A tied embedding's second copy has the values of the first.
            known = {each.block for each in there}
            there += [each for each in blocks if each.block not in known]
    owner = next((aside for aside in asides if aside.states), None)
    return replace(
        first,
        held=held,
        states=owner.states if owner else (),
        dtypes=owner.dtypes if owner else (),
        common=_joined_common([aside.common for aside in asides if aside.common is not None]),
        train_start_s=None,
    )


def _joined_common(commons: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    if not commons:
        return None
    groups = [group for each in commons for group in each["optimizer"]["param_groups"]]
    return {**commons[0], "optimizer": {**commons[0]["optimizer"], "param_groups": groups}}
