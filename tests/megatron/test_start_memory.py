"""Start, load and save fit where training does: at most one chunk is unsharded, none in a
checkpoint.

Counted are all floating-point tensors that any operation makes, not what the runtime knows of (see
`counted_entry`), and held against closed forms, to the byte.
"""

import json
from pathlib import Path

import pytest

from tests.megatron import counted_entry
from tests.megatron.comparison import UNTIED, flags_for
from tests.megatron.launch import run_ranks
from tests.megatron.plans import in_the_host
from tests.megatron.test_memory_by_chunks import (
    ELEMENT_BYTES,
    EVEN,
    HIDDEN,
    LAYER,
    NUM_LAYERS,
    chunk_bytes,
    closed_form,
    plan_of,
)
from zorse_megatron.plan.plan import Plan
from zorse_megatron.plan.plan_file import save_plan

SHARE = EVEN[0]
# Zeros that stock makes for what it counts and logs.
SCALARS_BYTES = 2 * ELEMENT_BYTES


def counted(plan: Plan, corpus: Path, work: Path, *more: str) -> list[dict[str, int]]:
    """Rank -> phase -> the most bytes on the device at one time, up to the end of a step."""
    save_plan(plan, work / "plan.json")
    flags = flags_for(corpus, *UNTIED, "--zorse-plan", str(work / "plan.json"), *more, steps=1)
    listed = list(flags)
    for name, value in {"--num-layers": NUM_LAYERS, "--hidden-size": HIDDEN}.items():
        listed[listed.index(name) + 1] = str(value)
    run_ranks(
        listed,
        plan.world_size,
        entry="tests.megatron.counted_entry",
        timeout_s=180,
        env={counted_entry.NAME: str(work)},
    ).check()
    ranks = range(plan.world_size)
    return [json.loads((work / f"counted-rank{rank}.json").read_text()) for rank in ranks]


def start_bytes(sizes: list[int], share: float) -> int:
    """The highest of the moments in which a chunk is wrapped.

    Then its parameters and gradients are unsharded; of those before it this share is there.
    """
    return max(2 * size + int(share * sum(sizes[:at])) for at, size in enumerate(sizes))


def test_start_of_one_chunk_is_the_closed_form(corpus: Path, tmp_path: Path) -> None:
    for found in counted(plan_of(1), corpus, tmp_path):
        assert found["start"] == start_bytes(chunk_bytes(1), SHARE) + SCALARS_BYTES


@pytest.mark.parametrize("where", ["on the device", "in the host"])
def test_start_is_the_closed_form_and_not_one_layer_is_unsharded_in_a_checkpoint(
    where: str, corpus: Path, tmp_path: Path
) -> None:
    """Shards and both moments are on the device or nothing is; others' parts of a layer are not."""
    plan, sizes, share = plan_of(4), chunk_bytes(4), SHARE
    if where == "in the host":
        plan, share = in_the_host(plan), 0.0
    shards = int(share * sum(sizes))
    checkpoint = str(tmp_path / "checkpoint")
    saving = ("--save", checkpoint, "--save-interval", "1")
    saved = counted(plan, corpus, tmp_path, *saving)
    loaded = counted(plan, corpus, tmp_path, "--load", checkpoint)
    for found in (*(each["save"] for each in saved), *(each["load"] for each in loaded)):
        assert 3 * shards <= found < 3 * shards + (1 - SHARE) * ELEMENT_BYTES * LAYER
    assert start_bytes(sizes, share) <= closed_form(sizes, share), "as in a step"
    for each in saved:
        assert each["start"] == start_bytes(sizes, share) + SCALARS_BYTES
