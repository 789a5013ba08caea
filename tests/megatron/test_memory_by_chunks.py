"""With c chunks per group, unsharded parameters and gradients are those of two chunks: about 2/c.

The closed form, to the byte. Layers here have only parameters whose sizes are multiples of 128
elements, so that stock's padding adds nothing. The step with state that waits in the host has a
closed form, too.
"""

import dataclasses
import json
from itertools import pairwise
from pathlib import Path

import pytest

from tests.megatron import small_pieces
from tests.megatron.comparison import UNTIED, flags_for
from tests.megatron.launch import run_ranks
from tests.megatron.plans import breadth_first, chunked_plan, replica, with_settings
from zorse_megatron.plan.plan import Plan
from zorse_megatron.plan.plan_file import save_plan

HIDDEN, SEQUENCE, VOCABULARY = 128, 32, 256
ELEMENT_BYTES = 4
LAYER = 12 * HIDDEN**2 + 13 * HIDDEN
NUM_LAYERS = 8
# Shards of these sizes are exact: others are cut at multiples of 64 elements.
EVEN, ALL_ON_ONE = (0.5, 0.5), (1.0, 0.0)
# Elements of state stepped at once, where there are many pieces: a shard of the model has 80.
PIECE = 10_000


def plan_of(num_chunks: int, setting: str = "per_pass", shares: tuple[float, float] = EVEN) -> Plan:
    """All layers in one group of two ranks that own these shares, in equal chunks."""
    pair = (replica(0, 1, 2, shares[0]), replica(1, 3, 2, shares[1]))
    plan = chunked_plan([pair], [(0, NUM_LAYERS // num_chunks)] * num_chunks)
    return dataclasses.replace(plan, schedule=breadth_first(parameters=setting))


def chunk_bytes(num_chunks: int) -> list[int]:
    """Parameters, or gradients: both are float32. The embedding and the head are at the ends."""
    elements = [NUM_LAYERS // num_chunks * LAYER] * num_chunks
    elements[0] += (VOCABULARY + SEQUENCE) * HIDDEN
    elements[-1] += VOCABULARY * HIDDEN + 2 * HIDDEN
    return [ELEMENT_BYTES * count for count in elements]


def closed_form(sizes: list[int], share: float) -> int:
    """The highest of the moments after a first backward of each chunk.

    Then its parameters and those of the next chunk down are unsharded, and its gradients and those
    of the chunk above. Of the others this rank has its share: of parameters always, of gradients
    once they have been reduced.
    """
    highest = 0
    for at in range(len(sizes)):
        # On the last chunk the group turns; the first has nothing below it.
        unsharded = {at, max(0, at - 1)}
        summed = {at, min(at + 1, len(sizes) - 1)}
        parameters = sum(s if i in unsharded else share * s for i, s in enumerate(sizes))
        gradients = sum(s if i in summed else share * s for i, s in enumerate(sizes) if i >= at)
        highest = max(highest, int(parameters + gradients))
    return highest


def measured(
    plan: Plan, corpus: Path, work: Path, *, piece: int | None = None
) -> list[dict[str, int]]:
    """Rank -> peak bytes by category; `piece`: elements of state stepped at once."""
    save_plan(plan, work / "plan.json")
    flags = [*flags_for(corpus, *UNTIED, steps=2), "--zorse-memory", str(work)]
    sizes = {"--num-layers": NUM_LAYERS, "--hidden-size": HIDDEN}
    for name, value in sizes.items():
        flags[flags.index(name) + 1] = str(value)
    run_ranks(
        [*flags, "--zorse-plan", str(work / "plan.json")],
        plan.world_size,
        entry="tests.megatron.small_pieces_entry",
        timeout_s=120,
        env={small_pieces.NAME: str(piece)} if piece else {},
    ).check()
    found = [json.loads((work / f"memory-rank{rank}.json").read_text()) for rank in (0, 1)]
    return [{c: peak["num_bytes"] for c, peak in one["peaks"].items()} for one in found]


@pytest.mark.parametrize(("num_chunks", "shares"), [(4, ALL_ON_ONE), (8, EVEN)])
def test_peak_is_the_closed_form(
    num_chunks: int, shares: tuple[float, float], corpus: Path, tmp_path: Path
) -> None:
    peaks = measured(plan_of(num_chunks, shares=shares), corpus, tmp_path)
    for found, share in zip(peaks, shares, strict=True):
        assert found["parameters and gradients"] == closed_form(chunk_bytes(num_chunks), share)


@pytest.mark.parametrize("setting", ["resident", "per_micro_batch"])
def test_other_settings(setting: str, corpus: Path, tmp_path: Path) -> None:
    """Resident: the whole stage. Gathered anew for each micro-batch: no more than per pass."""
    sizes = chunk_bytes(4)
    expected = 2 * sum(sizes) if setting == "resident" else closed_form(sizes, 0.5)
    for found in measured(plan_of(4, setting), corpus, tmp_path):
        assert found["parameters and gradients"] == expected


def test_two_pieces_of_the_state_in_the_host_are_here_in_a_step(
    corpus: Path, tmp_path: Path
) -> None:
    """The one that is stepped and the one that comes; both moments are float32.

    Shards of these chunks are smaller than a piece, so a piece is a shard.
    """
    plan = with_settings(plan_of(4), optimizer_state=True, parameters=True)
    pairs = max(one + other for one, other in pairwise(chunk_bytes(4)))
    for found, share in zip(measured(plan, corpus, tmp_path), EVEN, strict=True):
        assert found["optimizer state"] == 2 * share * pairs


def test_pieces_do_not_grow_with_the_model(corpus: Path, tmp_path: Path) -> None:
    """One chunk, whose shards have many times the elements of a piece."""
    plan = with_settings(plan_of(1, "resident"), optimizer_state=True)
    for found in measured(plan, corpus, tmp_path, piece=PIECE):
        assert found["optimizer state"] == 2 * 2 * 4 * PIECE
