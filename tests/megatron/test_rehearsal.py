"""On a GPU's streams everything waits for what it needs, and a wait that is missing is seen."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.megatron.comparison import LLAMA, flags_for
from tests.megatron.launch import run_ranks
from tests.megatron.plans import (
    BOTH_ENDS,
    LAYOUTS,
    TWO_BY_TWO,
    chunked_plan,
    expert_replica,
    plan_of,
    replica,
    split,
    tp_replica,
    with_settings,
)
from tests.megatron.test_exactness import CHANGES_NO_BIT, PIECES, ROWS, Row
from tests.megatron.test_experts import BALANCED as BALANCED_LOAD
from tests.megatron.test_experts import BIASED
from tests.megatron.test_experts import MODEL as OF_EXPERTS
from tests.megatron.test_lora import ALL as LORA
from tests.megatron.test_moving import FP16, A, B
from tests.megatron.upstream import SCRIPT
from zorse_megatron.plan.plan import Chunk, Plan, Schedule, TpShards
from zorse_megatron.plan.plan_file import save_plan
from zorse_megatron.schedule.samples import rank_micro_batches

APART, HOST = "interleaved, weight gradients apart", "in the host, layered"
LEVELS = "two levels, an idle rank and one without a shard"
A_PART = "a part of the state in the host"
ADAPTERS, SPREAD = "adapters", "experts in a tensor-parallel group"
SHARED = "experts of ranks with samples of their own, also beside products, and of a rank alone"
CASES = {
    APART: Row(
        plan=split(with_settings(BOTH_ENDS, schedule=Schedule(name="interleaved"))), steps=2
    ),
    SPREAD: Row(
        plan=plan_of(
            ((tp_replica((0, 1), 2, 4, 1.0, TpShards(experts=(1, 3))),), 3),
            ((replica(2, 4, 2),), 1),
        ),
        flags=(*OF_EXPERTS, *BIASED, "--sequence-parallel"),
        steps=2,
    ),
    SHARED: Row(
        plan=chunked_plan(
            [
                (expert_replica((0, 1), (1, 3), (2, 0), 2, overlap=True), replica(2, 4, 1)),
                (expert_replica((3, 4), (1, 3), (2, 2), 2),),
            ],
            [(0, 1), (1, 1), (0, 1), (1, 1)],
        ),
        flags=(*OF_EXPERTS, *BALANCED_LOAD),
        steps=2,
    ),
    ADAPTERS: Row(plan=TWO_BY_TWO, flags=(*LLAMA, *LORA), steps=2),
    **{
        name: replace(ROWS[name], steps=2)
        for name in (HOST, LEVELS, "1|2+1, llama, cyclic, recompute, no clip, sequence parallel")
    },
    A_PART: replace(CHANGES_NO_BIT[A_PART][1], steps=2),
}
# Where the host waits for the device in a step -> how often at most.
WAITS = {
    # Stock's train_step lets all ranks agree whether the step was made, and on its norm.
    "training train_under_plan": 3,
    "loss with_losses": 3,  # which calls it where the loss is known to the last rank only
    "step_sums in_host": 1,  # whether the step is run again, and its norm
    "streamed_gradients count_zeros": 1,
}
MOVED, BALANCED = "moved to another plan", "of other counts"
# One of the groups that are moved to keeps a part of its state on the device.
KEEPING = with_settings(B, optimizer_state=True, optimizer_state_fraction=0.4).groups[1]
# With what rank 0 says when it is done.
CHANGES = {
    # One group has its state in the host, the other on the device; no line of the log waits.
    MOVED: (
        Row(
            plan=replace(A, groups=(A.groups[0], TWO_BY_TWO.groups[1])),
            flags=(*FP16, "--log-interval", "4"),
            steps=3,
            env=PIECES,
        ),
        "from iteration 3 on the training runs under plan",
    ),
    BALANCED: (
        Row(
            plan=LAYOUTS["2|1"],
            flags=("--zorse-rebalance", "on"),
            steps=8,
            env={"ZORSE_TEST_WISHES": json.dumps({1: [[5, 3], [2]]})},
        ),
        "zorse: replicas of group 0 run 5, 3 micro-batches instead of 6, 2 from iteration",
    ),
}
# Where waits are left out -> what then has hazards.
MISSING = {
    "host_link hold_back": CASES[HOST],
    "transport after": CASES[APART],
    "collectives _on_streams": CASES[LEVELS],
    "expert_exchange wait": replace(
        CASES[SHARED],
        plan=plan_of(((expert_replica((0, 1), (1, 3), (2, 2), 2, overlap=True),), 4)),
        steps=1,
    ),
}


def rehearsed(
    row: Row, corpus: Path, record: Path, *, entry: str = "rehearsal_entry", without: str = ""
) -> tuple[Any, list[dict[str, Any]]]:
    """What the last rank logs, and of each rank hazards and waits."""
    record.mkdir(parents=True)
    save_plan(row.plan, record / "plan.json")
    training = flags_for(corpus, *row.flags, steps=row.steps)
    flags = [*SCRIPT, *training, "--zorse-plan", str(record / "plan.json")]
    env = {**row.env, "ZORSE_TEST_RECORD": str(record), "ZORSE_TEST_WITHOUT": without}
    ranks = range(row.plan.world_size)
    run = run_ranks(flags, len(ranks), entry=f"tests.megatron.{entry}", timeout_s=120, env=env)
    (record / "said").write_text(run.check().outputs[0])
    steps = json.loads((record / f"steps-rank{ranks[-1]}.json").read_text())
    if entry != "rehearsal_entry":
        return steps, []
    return steps, [
        json.loads((record / f"rehearsal-rank{rank}.json").read_text()) for rank in ranks
    ]


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_used_before_it_is_there(name: str, corpus: Path, tmp_path: Path) -> None:
    """And the host waits for the device no more than it must."""
    row = CASES[name]
    found, ranks = rehearsed(row, corpus, tmp_path / "watched")
    assert [each["hazards"] for each in ranks] == [[]] * len(ranks)
    for rank, each in enumerate(ranks):
        assert_few_waits(row, rank, Counter(each["waited"][-1]))
    if name == APART:  # test_nccl_order.py compares the others' kinds
        expected, _ = rehearsed(row, corpus, tmp_path / "plain", entry="recording_entry")
        assert found == expected


def assert_few_waits(row: Row, rank: int, found: Counter[str]) -> None:
    """The host waits where `WAITS` says, and for the loss of each micro-batch, as in stock."""
    is_last = row.plan.group_of_rank(rank) == row.plan.chunks[-1].group
    micro_batches = len(rank_micro_batches(row.plan, rank))
    losses = 2 * micro_batches if is_last else 0
    # Of what ours calls in a script, or in our entry.
    allowed = Counter({**WAITS, "loss _divided" if SCRIPT else "gpt_entry _validate": losses})
    if "--num-experts" in row.flags:  # on a GPU that has no products in Triton; else nowhere
        passes = micro_batches * sum(chunk.num_layers for chunk in chunks_of(row.plan, rank))
        group, number = row.plan.replica_of_rank(rank)
        if shared := row.plan.groups[group].replicas[number].expert_parallel:
            passes *= shared.parts
            # How many rows are sent and received.
            allowed["expert_exchange _routes"] = passes
        allowed["grouped_gemm placed_counts"] = passes
    if found["streamed_gradients count_zeros"]:
        allowed["training train_under_plan"] += 2  # their number, too
    assert found <= allowed, f"also waited for: {found - allowed}"
    assert found["step_sums in_host"] == 1, "waits are counted"


def chunks_of(plan: Plan, rank: int) -> list[Chunk]:
    return [plan.chunks[each] for each in plan.chunks_of_group(plan.group_of_rank(rank))]


@pytest.mark.parametrize("without", MISSING)
def test_a_wait_that_is_missing_is_seen(without: str, corpus: Path, tmp_path: Path) -> None:
    _, ranks = rehearsed(MISSING[without], corpus, tmp_path / "watched", without=without)
    assert any(without in each["waits"] for each in ranks), "it is waited for there"
    assert any(each["hazards"] for each in ranks)


@pytest.mark.parametrize("name", CHANGES)
def test_nothing_is_used_too_early_where_plans_change(
    name: str, corpus: Path, tmp_path: Path
) -> None:
    found, ranks = changed(name, corpus, tmp_path / "watched")
    assert [each["hazards"] for each in ranks] == [[]] * len(ranks)
    assert found == changed(name, corpus, tmp_path / "plain", entry="changing_entry")[0]


def test_a_wait_of_a_move_that_is_missing_is_seen(corpus: Path, tmp_path: Path) -> None:
    without = "state_transfer run"
    _, ranks = changed(MOVED, corpus, tmp_path / "watched", without=without)
    assert all(without in each["waits"] for each in ranks), "it is waited for there"
    found = [hazard for each in ranks for hazard in each["hazards"]]
    assert any("write on stream 0, and nothing waits for irecv at state" in each for each in found)


def changed(
    name: str, corpus: Path, record: Path, *, entry: str = "rehearsal_entry", without: str = ""
) -> tuple[Any, list[dict[str, Any]]]:
    """`rehearsed`; the run must say that it goes on with what it was asked for."""
    row, says = CHANGES[name]
    if name == MOVED:
        status = record.with_name(f"{record.name}-status")
        status.mkdir()
        save_plan(replace(B, groups=(B.groups[0], KEEPING)), status / "first.json")
        flags = (*row.flags, "--zorse-status", str(status))
        row = replace(row, flags=flags, env={**row.env, "ZORSE_TEST_MOVES": str(status)})
    result = rehearsed(row, corpus, record, entry=entry, without=without)
    assert says in (record / "said").read_text()
    return result
