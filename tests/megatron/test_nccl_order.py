"""The branches of NCCL, on the CPU: what ranks launch fits, and trains the same to the bit."""

import json
from collections import defaultdict
from dataclasses import replace
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import pytest

from scripts.launch_order.launches import CHOICES, ROWS, WEIGHTS, launches_of
from tests.megatron.comparison import BALANCED, EXPERTS, LLAMA, UNTIED, flags_for
from tests.megatron.launch import run_ranks
from tests.megatron.plans import (
    BOTH_ENDS,
    FIRST_LAYER,
    NONE,
    TRIO,
    chunked_plan,
    expert_replica,
    hierarchical,
    in_the_host,
    plan_of,
    replica,
    with_settings,
)
from tests.megatron.upstream import SCRIPT
from zorse_megatron.plan.plan import Group, Schedule, has_equal_tp_shards
from zorse_megatron.plan.plan_file import save_plan
from zorse_megatron.schedule.lower import lower_plan

STEPS = 2
# Copies of the tied embedding on groups that are cut differently, and the loss told to a third one.
INSIDE = plan_of(
    ((replica(0, 2, 3, 3.0), replica(1, 1, 2, 1.0)), 1),
    ((replica(4, 4, 2),), 2),
    ((replica(3, 1, 5, 1.0), replica(2, 3, 1, 0.3)), 1),
)
# A rank without samples and one without experts; a dense layer between two with experts.
SHARED = with_settings(
    plan_of(
        ((expert_replica((0, 1), (1, 3), (2, 2), 1, overlap=True), replica(2, 2, 2)), 3),
        ((expert_replica((3, 4, 5), (1, 0, 3), (2, 2, 0), 2),), 3),
    ),
    NONE,
    FIRST_LAYER,
)
SHARED_BREADTH_FIRST = chunked_plan(
    [
        (expert_replica((0, 1), (4, 0), (2, 2), 2, overlap=True),),
        (expert_replica((2, 4), (2, 2), (1, 3), 1), replica(3, 2, 2)),
    ],
    [(0, 2), (1, 2), (0, 2)],
)
WITH_EXPERTS = (1, 0, 1, 1, 0, 1)
OF_EXPERTS = (
    *(*LLAMA, *EXPERTS, *BALANCED, "--num-layers", str(len(WITH_EXPERTS))),
    *("--moe-layer-freq", str(list(WITH_EXPERTS)).replace(" ", "")),
)
PLANS = {
    "interleaved, offloaded, untied, one rank idle and one without a shard": with_settings(
        in_the_host(BOTH_ENDS), schedule=Schedule(name="interleaved")
    ),
    "hierarchical": hierarchical(TRIO, "aab"),
    "resident, with --overlap-grad-reduce, the last rank inside": INSIDE,
    "experts, shared in halves and recomputed": SHARED,
    "experts, shared in halves, breadth first, untied": SHARED_BREADTH_FIRST,
}
Launch = dict[str, Any]
WORLD = "0"
"""Name of the group of all ranks."""
KIND_OF = {"torch.int32": CHOICES, "torch.float32": ROWS, "torch.float64": WEIGHTS}
"""What ranks that share experts send each other, by its type."""


@pytest.mark.parametrize("name", PLANS)
def test_nccl_branches_train_the_same_and_their_launches_fit(
    name: str, corpus: Path, tmp_path: Path
) -> None:
    plan = PLANS[name]
    experts = OF_EXPERTS if "experts" in name else ()
    if experts:
        model = replace(plan.model, num_experts=4, moe_layer_freq=WITH_EXPERTS)
        plan = replace(plan, model=model)
    save_plan(plan, tmp_path / "plan.json")
    overlap = ("--overlap-grad-reduce", "--ddp-num-buckets", "2") if "--overlap" in name else ()
    untied = UNTIED if "untied" in name else ()
    training = flags_for(corpus, *overlap, *untied, *experts, steps=STEPS)
    flags = [*SCRIPT, *training, "--zorse-plan", str(tmp_path / "plan.json")]
    steps = {}
    for entry in ("recording_entry", "nccl_over_gloo_entry"):
        record = tmp_path / entry
        run_ranks(
            flags,
            plan.world_size,
            entry=f"tests.megatron.{entry}",
            timeout_s=60,
            env={"ZORSE_TEST_RECORD": str(record)},
        ).check()
        steps[entry] = json.loads((record / f"steps-rank{plan.world_size - 1}.json").read_text())
    assert steps["nccl_over_gloo_entry"] == steps["recording_entry"]
    launched = [
        told_apart(tmp_path / "nccl_over_gloo_entry" / f"launches-rank{rank}.json")
        for rank in range(plan.world_size)
    ]
    assert_both_ends_fit(launched)
    modelled = launches_of(plan, lower_plan(plan, tied=not untied))
    tied = tied_ranks(modelled)
    assert bool(tied) == (not untied)
    for rank in range(plan.world_size):
        group = plan.groups[plan.group_of_rank(rank)]
        swaps_with = tied if rank in tied else set()
        found = [place_of(launch, group, swaps_with) for launch in launched[rank]]
        expected = [modelled_place(each, rank) for each in modelled[rank] if each.operation]
        if group.hierarchical:
            assert_stages_fit(launched[rank], modelled[rank], group)
            expected = [place for place in expected if place != ("group",)]
        assert steps_of(found) == steps_of(expected * STEPS)


def assert_stages_fit(launched: list[Launch], modelled: list[Any], group: Group) -> None:
    """Of a hierarchical group, whose stages a thread starts: each communicator by itself.

    The group's own has no sums and gathers.
    """
    assert not [each for each in launched if place_of(each, group, set()) == ("group",)]
    for use, kinds in (
        ("across", {"alltoall_base": "exchange"}),
        ("region", {"reduce_scatter": "REDUCE_GRAD", "all_gather": "UNSHARD"}),
    ):
        expected = [
            "exchange" if use == "across" else each.kind[1:]
            for each in modelled
            if each.operation is not None and each.operation[0].use == use
        ]
        found = [
            kinds[each["kind"]]
            for each in launched
            if each["kind"] in kinds and set(each["ranks"]) <= set(group.ranks)
        ]
        assert bool(found) == bool(expected)
        # Weights are gathered before and after training, too, to be written down.
        steps = "".join(each for each, _ in groupby(expected * STEPS))
        assert steps in "".join(each for each, _ in groupby(found))


def assert_both_ends_fit(launched: list[list[Launch]]) -> None:
    """Each communicator has the same operations of the same sizes on all of its ranks, in order."""
    collectives: dict[str, dict[int, list[Any]]] = defaultdict(dict)
    messages: dict[tuple[str, int, int], dict[bool, list[Any]]] = defaultdict(dict)
    for rank, launches in enumerate(launched):
        for launch in launches:
            group = launch["group"]
            if launch["peer"] is None:
                of_rank = collectives[group].setdefault(rank, [])
                of_rank.append((launch["kind"], launch["numel"], launch["dtype"]))
                continue
            sends = launch["kind"] == "send"
            ends = (rank, launch["peer"]) if sends else (launch["peer"], rank)
            messages[group, *ends].setdefault(sends, []).append(launch["numel"])
    assert messages
    for each in collectives.values():
        first, *others = each.values()
        assert all(other == first for other in others)
    for ends in messages.values():
        assert ends[True] == ends[False]


def tied_ranks(modelled: list[list[Any]]) -> set[int]:
    """Those that swap gradients of a tied embedding, as the model has it."""
    return {each.rank for of_rank in modelled for each in of_rank if each.kind.endswith("TIE")}


def told_apart(path: Path) -> list[Launch]:
    """A rank's launches, each with whether it is between ranks that share experts.

    They have a communicator of their own, also where they are all of their group.
    """
    launched: list[Launch] = json.loads(path.read_text())
    tell = {each["group"] for each in launched if KIND_OF.get(each["dtype"]) == CHOICES}
    return [{**each, "of_experts": each["group"] in tell} for each in launched]


def place_of(launch: Launch, group: Group, swaps_with: set[int]) -> tuple[Any, ...]:
    """What the launch is to the model; nothing where that has none, as of start-up."""
    kind, numel, peer = launch["kind"], launch["numel"], launch["peer"]
    if launch["of_experts"]:
        return ("experts", KIND_OF[launch["dtype"]])
    if len(launch["ranks"]) == 2 and peer is not None:
        meets = numel == [1]  # the message by which the ends of a link meet
        return () if meets else (kind, peer)
    if launch["group"] == WORLD and peer is not None:
        return ("world", "TIE") if peer in swaps_with else ("world", kind, peer)
    if launch["group"] == WORLD and kind == "allreduce":
        return ("world", "SCALE")
    kinds = ("reduce_scatter", "all_gather") if has_equal_tp_shards(group) else ("alltoall_base",)
    is_own = launch["ranks"] == sorted(group.ranks) and kind in kinds
    return ("group",) if is_own else ()


def modelled_place(launch: Any, rank: int) -> tuple[Any, ...]:
    communicator, _ = launch.operation
    others = [each for each in communicator.ranks if each != rank]
    if communicator.use == "link":
        return (launch.kind, *others)
    if communicator.use == "world":
        is_message = launch.kind in ("send", "receive")
        return ("world", launch.kind, *(others if is_message else ()))
    if communicator.use == "tp_group":
        return ("experts", launch.kind.split(", ")[-1])
    return ("group",)


def steps_of(places: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """From the first message on a link to the last number of all ranks, or of the loss.

    Without repetitions, as an action is one operation for each bucket, but of what ranks send that
    share experts. Weights are gathered before and after training, too, to be written down; what a
    rank sums before is of start-up.
    """
    both = pairwise([(), *filter(None, places)])
    found = [place for before, place in both if place != before or place[0] == "experts"]
    messages = [at for at, place in enumerate(found) if place[0] in ("send", "receive")]
    last = max((at for at, place in enumerate(found) if place != ("group",)), default=0)
    return found[messages[0] : last + 1] if messages else []
