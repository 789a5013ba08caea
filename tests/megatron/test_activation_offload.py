"""Activations in the host without full recomputation: the same bits, in the memory that the
simulator says, there and on the device."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.megatron.comparison import MASKED, NO_CLIP, UNTIED, assert_same_bits, flags_for, plan_run
from tests.megatron.plans import (
    BOTH_ENDS,
    FIRST_LAYER,
    LAYOUTS,
    NONE,
    SELECTIVE,
    TWO_BY_TWO,
    chunked_plan,
    expert_replica,
    replica,
    split,
    with_settings,
)
from tests.megatron.test_memory_ledger import (
    EXPERTS,
    HIDDEN,
    LORA,
    MEMORY,
    MODEL,
    OF_EXPERTS,
    SEQUENCE,
    costs_of_parts,
    logits_bytes,
    most_activation_bytes,
    run,
)
from tests.unit.fake_costs import FakeComm, FakeCompute
from zorse_megatron.costs.interface import JobCosts
from zorse_megatron.inputs.model import LatentAttention, ModelShape
from zorse_megatron.plan.plan import Plan, Recompute, Schedule
from zorse_megatron.schedule.transfer_windows import most_away
from zorse_megatron.simulate.iteration import simulate
from zorse_megatron.simulate.memory_ledger import Category
from zorse_megatron.simulate.result import SimulationResult

CASES: dict[str, tuple[Plan, Sequence[Recompute], Sequence[str]]] = {
    "1f1b, weight gradients apart": (split(LAYOUTS["1|1|1|1"]), (NONE,), ()),
    "interleaved": (
        with_settings(TWO_BY_TWO, schedule=Schedule(name="interleaved")),
        (SELECTIVE, NONE),
        UNTIED,
    ),
    "breadth first": (BOTH_ENDS, (NONE, FIRST_LAYER), ()),
}


def sized(flags: Sequence[str], **values: object) -> list[str]:
    """The flags with other values of some."""
    found = list(flags)
    for name, value in values.items():
        found[found.index(f"--{name.replace('_', '-')}") + 1] = str(value)
    return found


def in_host_bytes(predicted: SimulationResult, rank: int) -> int:
    """What waits there at most, in blocks that are not rounded up."""
    sizes = predicted.timeline.sizes
    saved = {chunk: sizes.micro_batch_bytes(rank, chunk, 0).saved for chunk in sizes.chunks(rank)}
    return most_away(predicted.timeline.program.tracks[rank].actions, saved)


@pytest.mark.parametrize("name", CASES)
def test_same_bits_in_the_memory_that_the_simulator_says(
    name: str, corpus: Path, tmp_path: Path
) -> None:
    """The limit of host memory is what it says, so that no rank asks for more or holds more."""
    plan, recompute, more = CASES[name]
    flags = flags_for(corpus, *more, *MASKED, *NO_CLIP, steps=2)
    length = {"seq_length": SEQUENCE, "max_position_embeddings": SEQUENCE}
    flags = sized(flags, hidden_size=HIDDEN, **length)
    here = plan_run(with_settings(plan, *recompute), flags)
    away = with_settings(plan, *recompute, activations=True)
    predicted = simulate(
        away,
        JobCosts(
            compute=FakeCompute(),
            memory=MEMORY,
            comm=FakeComm(host_bytes_per_s=float("inf")),  # a copy is done when it is started
            kinds=["kind"] * plan.world_size,
            sequence_length=SEQUENCE,
        ),
    )
    in_host = [in_host_bytes(predicted, rank) for rank in range(plan.world_size)]
    assert max(in_host) > 0
    limit = ("--zorse-host-memory-limit", str((sum(in_host) + 0.5) / 1e9))
    found = plan_run(away, [*flags, *limit, "--zorse-memory", str(tmp_path)])
    assert_same_bits(found, here)
    for rank in range(plan.world_size):
        peaks = json.loads((tmp_path / f"memory-rank{rank}.json").read_text())["peaks"]
        held = peaks.get("activations in the host", {"num_bytes": 0})
        assert held["num_bytes"] == in_host[rank]
        head = predicted.memory[rank].by_category_bytes[Category.LOGITS]
        copies = logits_bytes(plan, rank) if head else 0
        least = most_activation_bytes(predicted, rank, copies)
        # The head's part may still be there while what the next backward needs comes back.
        most = least + max(0, head - copies)
        most_found = peaks["activations"]["num_bytes"]
        assert most_found <= 1.05 * most
        if FIRST_LAYER not in recompute:
            # Else layers that are kept are gone when the first is computed again, which the
            # simulator adds to all.
            assert most_found >= 0.95 * least


APART = chunked_plan(
    [(expert_replica((0, 1), (1, 3), (3, 1), 2),), (replica(2, 4, 2),)],
    [(0, 1), (1, 2), (0, 1)],
)
IDLE = chunked_plan(
    [
        (replace(expert_replica((0, 1), (1, 3), (3, 1), 2), num_microbatches=0), replica(2, 4, 2)),
        (replica(3, 4, 2),),
    ],
    [(0, 1), (1, 2), (0, 1)],
)
ALONE = chunked_plan([(replica(0, 4, 2),), (replica(1, 4, 2),)], [(0, 1), (1, 2), (0, 1)])
LATENT = replace(
    MODEL,
    linear_bias=False,
    position_embedding="rope",
    latent=LatentAttention(
        kv_lora_rank=32, q_lora_rank=40, qk_head_dim=16, qk_pos_emb_head_dim=8, v_head_dim=24
    ),
)
OF_LATENT = (
    *("--multi-latent-attention", "--position-embedding-type", "rope", "--disable-bias-linear"),
    *("--kv-lora-rank", "32", "--q-lora-rank", "40", "--qk-head-dim", "16"),
    *("--qk-pos-emb-head-dim", "8", "--v-head-dim", "24"),
)


@pytest.mark.parametrize(
    ("plan", "model", "flags"),
    [
        # The rank with most experts has the fewest samples.
        pytest.param(APART, EXPERTS.model, OF_EXPERTS, id="experts apart"),
        pytest.param(IDLE, EXPERTS.model, OF_EXPERTS, id="experts of ranks that only hold state"),
        pytest.param(ALONE, LATENT, OF_LATENT, id="latent attention"),
        pytest.param(ALONE, MODEL, ("--zorse-lora", str(LORA)), id="adapters"),
    ],
)
def test_ranks_ask_for_what_their_layers_keep(
    plan: Plan, model: ModelShape, flags: Sequence[str], corpus: Path, tmp_path: Path
) -> None:
    """Routing is even; small tensors stay."""
    away = with_settings(plan, NONE, NONE, activations=True)
    lora = LORA if "--zorse-lora" in flags else None
    costs = replace(costs_of_parts(away, model, lora), comm=FakeComm(host_bytes_per_s=float("inf")))
    predicted = simulate(away, costs)
    in_host = [in_host_bytes(predicted, rank) for rank in range(away.world_size)]
    limit = ("--zorse-host-memory-limit", str(1.01 * sum(in_host) / 1e9))
    more = (*flags, *limit, "--zorse-memory", str(tmp_path))
    run(away, corpus, tmp_path, *more, entry="tests.megatron.even_routers_entry").check()
    for rank in range(away.world_size):
        peaks = json.loads((tmp_path / f"memory-rank{rank}.json").read_text())["peaks"]
        held = peaks.get("activations in the host", {"num_bytes": 0})
        assert 0.98 * in_host[rank] <= held["num_bytes"] <= in_host[rank]


def test_what_carries_no_gradient_leaves_and_comes_back(corpus: Path) -> None:
    """Dropout's masks; rotary tables, which all micro-batches share, stay."""
    llama = ("--swiglu", "--position-embedding-type", "rope", "--normalization", "RMSNorm")
    flags = flags_for(corpus, *llama, *MASKED, *NO_CLIP, steps=2)
    flags = sized(flags, attention_dropout=0.1, hidden_dropout=0.1)
    here, away = (
        plan_run(with_settings(LAYOUTS["2|1"], FIRST_LAYER, **offload), flags)
        for offload in ({}, {"activations": True})
    )
    assert_same_bits(away, here)
