"""A forward that begins while its chunk is gathered: each layer waits for its own parameters."""

import dataclasses

import pytest

from tests.unit.fake_costs import FakeComm, FakeCompute, FakeMemory
from tests.unit.made_plans import even_plan, one_group
from tests.unit.simulation import run, transfers_of
from zorse_megatron.plan.plan import Chunk, ModelFingerprint, Schedule

RATE = 64.0
BACKWARD_S = 2.0


def sharded(layers):
    plan = one_group((1, 1), (1, 1), layers=layers)
    return dataclasses.replace(plan, schedule=Schedule(name="breadth_first"))


def gather_s(parameters):
    """2 bytes each, over a ring of two, with a latency."""
    return 0.5 + 1 / 2 * 2 * parameters / RATE if parameters else 0.0


def reduce_s(parameters):
    return 0.5 + 1 / 2 * 4 * parameters / RATE if parameters else 0.0


@pytest.mark.parametrize("layers", [1, 2, 3, 7])
@pytest.mark.parametrize(
    ("embedding", "head"), [(0, 0), (100, 64), (1000, 64), (0, 5000), (5000, 640)]
)
@pytest.mark.parametrize("forward_s", [0.0, 3.0, 10.5, 40.0])
def test_each_layer_starts_when_its_parameters_are_there(layers, embedding, head, forward_s):
    """Against all layers, one by one. Beside a gather the embedding takes no time."""
    head_s = 4.0 if head else 0.0
    found = run(
        sharded(layers),
        compute=FakeCompute(forward_s=forward_s, backward_s=BACKWARD_S, head_s=head_s),
        memory=FakeMemory(embedding_count=embedding, head_count=head),
        comm=FakeComm(collective_latency_s=0.5, bytes_per_s=RATE),
    )
    sections = [(embedding, 0.0), *[(640, forward_s)] * layers, (head, head_s)]
    gathered_s = computed_s = summed_s = 0.0
    for parameters, section_s in sections:
        gathered_s += gather_s(parameters)
        computed_s = max(computed_s, gathered_s) + section_s
        summed_s += reduce_s(parameters)
    expected_s = computed_s + head_s + layers * BACKWARD_S + summed_s
    assert found.iteration_s == pytest.approx(expected_s)


def test_a_backward_waits_for_all():
    """The first of three chunks is gathered again for its backward, which begins with the last."""
    chunks = tuple(Chunk(group=0, layers=(first, first + 2)) for first in (0, 2, 4))
    plan = dataclasses.replace(sharded(6), chunks=chunks)
    found = run(
        plan,
        compute=FakeCompute(forward_s=1.0, backward_s=BACKWARD_S),
        comm=FakeComm(bytes_per_s=RATE),
    )
    spans = {span.action: span for span in found.spans(0)}
    gathers = [span for span in found.spans(0) if span.action == "0UNSHARD"]
    assert len(gathers) == 2
    assert spans["0B0"].end_s - 2 * BACKWARD_S >= gathers[1].end_s
    assert spans["0F0"].end_s - 2 * 1.0 < gathers[0].end_s
    assert spans["0F0"].start_s == gathers[0].end_s / 2  # with the first of two layers
    assert (gathers[0].waited_s, spans["0F0"].waited_s) == (0.0, 0.0)
    assert spans["0F0"].end_s == gathers[0].end_s + 1.0
    # The next chunk's gather comes behind all of the first one's.
    assert spans["1UNSHARD"].end_s == gathers[0].end_s + (gathers[0].end_s - gathers[0].start_s)


def test_no_layer_starts_before_the_input_has_arrived():
    """Of the second of two groups, whose parameters are there long before."""
    plan = dataclasses.replace(
        even_plan(2, 2, 2),
        schedule=Schedule(name="breadth_first"),
        model=ModelFingerprint(num_layers=8),
    )
    chunks = tuple(Chunk(group=number, layers=(4 * number, 4 * number + 4)) for number in range(2))
    found = run(
        dataclasses.replace(plan, chunks=chunks),
        memory=FakeMemory(boundary=64),
        comm=FakeComm(bytes_per_s=RATE, latency_s=50.0),
    )
    arrived_s = {
        each.target: each.end_s
        for each in reversed(transfers_of(found))
        if "SEND_F0" in each.action
    }
    for rank in (2, 3):
        span = next(each for each in found.spans(rank) if each.action == "1F0")
        assert span.end_s == arrived_s[rank] + 4 * 1.0


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
@pytest.mark.parametrize("bytes_per_s", [1.0, 64.0])
def test_chunks_that_stay_unsharded_are_waited_for_as_a_whole(schedule, bytes_per_s):
    """Their buckets are Megatron's: one, if nothing is overlapped."""
    plan = dataclasses.replace(
        one_group((1, 1), (1, 1), layers=4), schedule=Schedule(name=schedule)
    )
    found = run(plan, comm=FakeComm(bytes_per_s=bytes_per_s))
    assert found.iteration_s == pytest.approx(4 * (1 + 2) + (4 + 2) * 4 * 640 / 2 / bytes_per_s)
