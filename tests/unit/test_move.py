"""Moves to another plan: who sends what, what is asked, and what it costs."""

import json
import os
from collections import Counter
from dataclasses import replace
from math import prod
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn
from typer.testing import CliRunner, Result

from tests.equal_parts import equal_part
from tests.examples import examples
from tests.strategies import lowerable_plans
from tests.unit.made_plans import plan_of, replica
from zorse_megatron.cli.main import app
from zorse_megatron.files.read_write import MAX_INPUT_BYTES
from zorse_megatron.inputs.cluster_yaml import parse_cluster
from zorse_megatron.inputs.model import Experts, ModelShape
from zorse_megatron.inputs.status import STATUS_NAME, dump_status
from zorse_megatron.live import move as request_module
from zorse_megatron.live.move import (
    REQUEST_NAME,
    MoveError,
    Owners,
    Transfer,
    elements,
    make_request,
    move_s,
    moved_bytes,
    owners,
    peak_bytes,
    plan_transfers,
    take_request,
)
from zorse_megatron.live.run_status import RunStatus
from zorse_megatron.plan.plan import ExpertParallel, Plan
from zorse_megatron.plan.plan_file import fingerprint, parse_plan, save_plan
from zorse_megatron.schedule.tensor_parallel_parts import (
    TensorBlock,
    interval_blocks,
    owned_blocks,
)

RANKS = 5
STATE_BYTES = (4, 4, 2)
Shapes = dict[str, tuple[int, ...]]
Places = dict[int, set[tuple[str, int]]]
"""Rank -> elements that it owns: parameter and place."""


@st.composite
def owners_under_a_plan(draw: DrawFn, shapes: Shapes) -> dict[int, dict[str, list[TensorBlock]]]:
    """Groups of ranks, each with some of the parameters, in TP groups or in shards; perhaps two
    copies.

    A parameter with two copies is a tied embedding.
    """
    ranks = draw(st.permutations(range(RANKS)))
    cut = draw(st.integers(1, RANKS - 1))
    groups = draw(st.sampled_from([[ranks], [ranks[:cut], ranks[cut:]]]))
    owners: dict[int, dict[str, list[TensorBlock]]] = {rank: {} for rank in ranks}
    for name, shape in shapes.items():
        holding = groups if name == "tied" else [draw(st.sampled_from(groups))]
        for group in holding:
            for rank, block in draw(dealt(shape, group)):
                owners[rank].setdefault(name, []).append(block)
    return owners


@st.composite
def dealt(draw: DrawFn, shape: tuple[int, ...], group: list[int]) -> list[tuple[int, TensorBlock]]:
    """A tensor dealt out to one TP group of all ranks, or to replicas of one rank by weight."""
    if draw(st.booleans()):
        axis = draw(st.sampled_from([None, *range(len(shape))]))
        parts = {
            rank: equal_part(shape, axis, index=index, degree=len(group))
            for index, rank in enumerate(group)
        }
        replicas, weights = [parts], [1.0]
    else:
        replicas = [{rank: equal_part(shape, None, index=0, degree=1)} for rank in group]
        weight = st.sampled_from([0.0, 1.0, 2.5])
        weights = draw(st.lists(weight, min_size=len(group), max_size=len(group)).filter(any))
    return [(each.owner, each.block) for each in owned_blocks(replicas, weights)]


@st.composite
def two_plans(draw: DrawFn) -> tuple[Shapes, Owners, Owners]:
    side = st.integers(1, 9)
    shapes = {
        name: tuple(draw(st.lists(side, min_size=1, max_size=3))) for name in ("b", "a", "tied")
    }
    return shapes, draw(owners_under_a_plan(shapes)), draw(owners_under_a_plan(shapes))


def numbers(shape: tuple[int, ...], block: TensorBlock) -> list[int]:
    """Places in the flattened tensor, from the coordinates of each element."""
    sides = (slice(o, o + n) for o, n in zip(block.offset, block.size, strict=True))
    found: list[int] = np.arange(prod(shape)).reshape(shape)[tuple(sides)].ravel().tolist()
    return found


def places(shapes: Shapes, owners: Owners) -> Places:
    return {
        rank: {
            (name, at)
            for name, blocks in owned.items()
            for block in blocks
            for at in numbers(shapes[name], block)
        }
        for rank, owned in owners.items()
    }


@given(two_plans())
def test_every_element_gets_to_its_owner_once(plans: tuple[Shapes, Owners, Owners]) -> None:
    shapes, before, after = plans
    had, wanted = places(shapes, before), places(shapes, after)
    got: Counter[tuple[int, str, int]] = Counter()
    for each in plan_transfers(before, after):
        for at in numbers(shapes[each.parameter], each.block):
            assert (each.parameter, at) in had[each.source]
            got[each.destination, each.parameter, at] += 1
    assert got == Counter((rank, *place) for rank, owned in wanted.items() for place in owned)


@given(two_plans())
def test_bytes_are_those_of_what_owners_lack(plans: tuple[Shapes, Owners, Owners]) -> None:
    shapes, before, after = plans
    had, wanted = places(shapes, before), places(shapes, after)
    transfers = plan_transfers(before, after)
    each_b = sum(STATE_BYTES)
    lacking = {rank: each_b * len(wanted[rank] - had[rank]) for rank in wanted}
    sent, received = moved_bytes(transfers, STATE_BYTES)
    assert received == Counter({rank: count for rank, count in lacking.items() if count})
    assert sent.total() == sum(lacking.values())
    for rank, owned in before.items():
        assert elements(owned) == len(had[rank])


@given(two_plans())
def test_the_peak_is_that_of_an_account_of_buffers(plans: tuple[Shapes, Owners, Owners]) -> None:
    """Allocate and free in the order of a move, one state of one parameter after the other."""
    shapes, before, after = plans
    had = places(shapes, before)
    transfers = plan_transfers(before, after)
    for rank in range(RANKS):
        held = highest = sum(STATE_BYTES) * len(had[rank])
        for name in sorted(shapes):
            aside = sum(place[0] == name for place in had[rank])
            messages = [t for t in transfers if t.is_sent and t.parameter == name]
            passing = sum(t.block.numel for t in messages if rank in (t.source, t.destination))
            for itemsize in STATE_BYTES:
                held += itemsize * passing
                highest = max(highest, held)
                held -= itemsize * passing
            held -= sum(STATE_BYTES) * aside
        assert held == 0
        assert peak_bytes(rank, before[rank], transfers, STATE_BYTES) == highest


@given(two_plans())
def test_an_element_without_an_owner_is_refused(plans: tuple[Shapes, Owners, Owners]) -> None:
    _, before, after = plans
    poorer = {rank: {n: b for n, b in owned.items() if n != "a"} for rank, owned in before.items()}
    with pytest.raises(MoveError, match="parameter a"):
        plan_transfers(poorer, after)


def test_what_a_rank_owns_already_is_not_sent() -> None:
    """Of two copies of the same rows, the one on the rank itself; else the lowest rank's."""
    rows = TensorBlock(offset=(0, 0), size=(4, 3))
    lower, upper = (TensorBlock(offset=(at, 0), size=(2, 3)) for at in (0, 2))
    before = {0: {"w": [rows]}, 1: {"w": [lower]}, 2: {"w": [upper]}}
    after = {1: {"w": [rows]}, 2: {"w": [upper]}}
    assert plan_transfers(before, after) == (
        Transfer(parameter="w", block=lower, source=1, destination=1),
        Transfer(parameter="w", block=upper, source=0, destination=1),
        Transfer(parameter="w", block=upper, source=2, destination=2),
    )


def test_a_change_of_weights_moves_the_difference() -> None:
    """From 3:1 to 1:1 of 4,096 elements, a quarter goes from the first rank to the second."""
    shape = (4096,)
    before, after = (
        {rank: {"w": list(interval_blocks(shape, span))} for rank, span in enumerate(spans)}
        for spans in (((0, 3072), (3072, 4096)), ((0, 2048), (2048, 4096)))
    )
    (sent,) = [each for each in plan_transfers(before, after) if each.is_sent]
    assert (sent.source, sent.destination, sent.block.numel) == (0, 1, prod(shape) // 4)


# Requests.


def weighted(*weights: float) -> Plan:
    return plan_of([replica(rank, count=4, weight=weight) for rank, weight in enumerate(weights)])


RUNS = weighted(1.0, 1.0)


@pytest.fixture
def run_directory(tmp_path: Path) -> Path:
    """The directory of a run's status."""
    directory = tmp_path / "status"
    directory.mkdir()
    status = RunStatus(plan=RUNS, tokens_per_iteration=1, first_iteration=0)
    (directory / STATUS_NAME).write_text(dump_status(status.now(written_s=1.0)))
    return directory


def asked(directory: Path, plan: Plan, *more: str) -> Result:
    path = directory.parent / "next.json"
    save_plan(plan, path)
    return CliRunner().invoke(app, ["move", str(directory), str(path), *more])


def test_a_request_is_the_plan_and_is_taken_once(run_directory: Path) -> None:
    other = weighted(3.0, 1.0)
    result = asked(run_directory, other, "--json")
    assert json.loads(result.stdout)["plan"] == fingerprint(other), result.output
    data = take_request(run_directory)
    assert data is not None and parse_plan(data) == other
    assert take_request(run_directory) is None


def test_a_run_that_has_not_looked_yet_gets_the_last_request(run_directory: Path) -> None:
    for weight in (2.0, 5.0):
        assert asked(run_directory, weighted(weight, 1.0)).exit_code == 0
    data = take_request(run_directory)
    assert data is not None and parse_plan(data) == weighted(5.0, 1.0)


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        pytest.param(RUNS, "under which the run is", id="the same"),
        pytest.param(weighted(1.0, 1.0, 1.0), "a plan of 3 ranks; expected 2", id="other ranks"),
    ],
)
def test_what_the_run_cannot_do_is_not_asked(plan: Plan, words: str, run_directory: Path) -> None:
    result = asked(run_directory, plan)
    assert result.exit_code == 1
    assert words in " ".join(result.output.split())
    assert not (run_directory / REQUEST_NAME).exists()


def test_a_request_that_comes_while_another_is_read_is_not_lost(
    run_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = weighted(2.0, 1.0), weighted(5.0, 1.0)
    make_request(run_directory, first)
    read = request_module.read_input

    def read_slowly(path: Path) -> bytes:
        data = read(path)
        make_request(run_directory, second)
        return data

    with monkeypatch.context() as slow:
        slow.setattr(request_module, "read_input", read_slowly)
        data = take_request(run_directory)
    assert data is not None and parse_plan(data) == first
    data = take_request(run_directory)
    assert data is not None and parse_plan(data) == second
    assert take_request(run_directory) is None


def test_a_request_that_cannot_be_read_is_answered_once(run_directory: Path) -> None:
    with (run_directory / REQUEST_NAME).open("wb") as file:
        file.truncate(MAX_INPUT_BYTES + 1)
    assert take_request(run_directory) == b""
    assert take_request(run_directory) is None


@pytest.mark.parametrize("kind", ["a FIFO", "a directory", "a link"])
def test_a_request_that_is_no_file_is_named_and_left(kind: str, run_directory: Path) -> None:
    """The second one of a name was no longer seen, nor any request after it."""
    other, request = run_directory / "other", run_directory / REQUEST_NAME
    other.write_text("{}")
    if kind == "a FIFO":
        os.mkfifo(request)
    elif kind == "a directory":
        (request / "sub").mkdir(parents=True)
    else:
        request.symlink_to(other)
    for _ in range(2):
        with pytest.raises(MoveError, match=f"{REQUEST_NAME}: found {kind}; expected a plan file"):
            take_request(run_directory)
    result = asked(run_directory, weighted(3.0, 1.0))
    # Only a link can be replaced.
    assert (result.exit_code == 0) == (kind == "a link")
    assert other.read_text() == "{}"


# Costs.


def model_of(plan: Plan) -> ModelShape:
    return ModelShape(
        name="tiny",
        num_layers=plan.model.num_layers,
        hidden_size=4,
        ffn_hidden_size=8,
        num_attention_heads=1,
        num_query_groups=1,
        kv_channels=4,
        vocab_size=16,
        seq_length=8,
    )


def elements_of(plan: Plan, model: ModelShape) -> list[set[tuple[str, int]]]:
    """Rank -> every element that it owns."""
    return [
        {
            (name, block.offset[0] + at)
            for name, blocks in owned.items()
            for block in blocks
            for at in range(block.size[0])
        }
        for _, owned in sorted(owners(plan, model).items())
    ]


def test_ranks_that_share_experts_own_theirs_and_what_their_weights_say() -> None:
    """Other groups have embedding and head."""
    shared = ExpertParallel(experts=(1, 3), samples=(1, 1), shard_weights=(1.0, 0.0))
    pair = replica(1, 2, size=2, expert_parallel=shared)
    plan = plan_of([replica(0, size=2)], [pair], [replica(3, size=2)])
    experts = Experts(num_experts=4, per_token=2, ffn_hidden_size=8)
    model = replace(model_of(plan), experts=experts)
    layer, of_experts = model.layer_parameters(), model.expert_parameters
    _, first, second, _ = map(len, elements_of(plan, model))
    assert first == layer - of_experts + of_experts // 4
    assert second == of_experts * 3 // 4


@settings(max_examples=examples(30))
@given(plan=lowerable_plans())
def test_every_element_has_one_owner(plan: Plan) -> None:
    model = model_of(plan)
    owned = elements_of(plan, model)
    assert sum(map(len, owned)) == model.num_parameters == len(set().union(*owned))
    adapters = replace(plan, model=replace(plan.model, lora="rank=3,alpha=6,targets=k,down"))
    owned = elements_of(adapters, model)
    per_layer = 3 * (4 + 4) + 3 * (8 + 4)  # what is frozen does not move
    assert sum(map(len, owned)) == plan.model.num_layers * per_layer == len(set().union(*owned))


SMALL = st.lists(
    lowerable_plans(max_world=3, max_groups=2, num_layers=st.just(4)), min_size=2, max_size=6
)


@settings(max_examples=examples(30))
@given(plans=SMALL)
def test_what_new_owners_lack_is_sent(plans: list[Plan]) -> None:
    before = plans[0]
    after = next((each for each in plans[1:] if each.world_size == before.world_size), before)
    model = model_of(before)
    cluster = parse_cluster(
        f"nodes: [{{count: {before.world_size}, gpus: 1 x T4, nics: 80 Gb/s}}]".encode()
    )
    seconds = move_s(before, after, model, cluster, rebuild_s=7.0)
    old, new = elements_of(before, model), elements_of(after, model)
    lacking = [len(theirs - had) for had, theirs in zip(old, new, strict=True)]
    copied = max(map(len, old)) + max(map(len, new))  # to the host, and up again
    copied_s = 12 * copied / cluster.nodes[0].host_link_bytes_per_s
    # Of equal terms, which are summed in another order.
    assert seconds > (7.0 + 12 * max(lacking) / 10e9 + copied_s) * (1 - 1e-12)
