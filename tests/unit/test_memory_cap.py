"""What an emulated GPU holds of a chunk whose parameters and gradients come and go."""

from types import SimpleNamespace

import pytest
import torch

from tests.unit.fake_costs import FakeMemory
from zorse_megatron.emulate.on_ranks.memory_cap import MemoryCap

# A chunk of 100 parameters, of which the rank owns 25; they are unsharded, its gradients are not
# there.
UNSHARDED, OWNED = 100, 25
GONE = torch.empty(0)
CHUNK = SimpleNamespace(
    buffers=[SimpleNamespace(parameters=torch.empty(1), gradients=GONE)],
    wrapped=SimpleNamespace(shards=SimpleNamespace(gradients=[])),
    layers=(),
    embedding=None,
    output_layer=None,
    has_own_output_table=False,
)
SIZES = SimpleNamespace(
    memory=FakeMemory(),
    real_parameters=lambda _chunk: {"layer": UNSHARDED},
    owned_parameters=lambda _chunk: OWNED,
)


def cap(capacity_bytes):
    made = MemoryCap(SIZES, capacity_bytes=capacity_bytes, rank=3)
    made.chunks = [CHUNK]
    return made


def test_before_the_first_step_there_are_no_moments():
    """2 bytes of each parameter, and the main parameters of what the rank owns."""
    needed = 2 * UNSHARDED + 4 * OWNED
    enough = cap(needed)
    enough.check_start()
    assert enough.peak_bytes == 0  # which is no peak of a step
    with pytest.raises(torch.OutOfMemoryError, match="GPU of rank 3 would hold"):
        cap(needed - 1).check_start()


def test_in_a_step_there_are():
    needed = 2 * UNSHARDED + 12 * OWNED
    enough = cap(needed)
    enough.check()
    assert enough.peak_bytes == needed
    with pytest.raises(torch.OutOfMemoryError):
        cap(needed).keep(1)


def test_what_the_last_backward_had_is_not_there_in_the_step():
    state = 2 * UNSHARDED + 12 * OWNED
    one = cap(state + 1000)
    one.keep_layer(one.memory, 1, "none")
    one.peak_bytes = 0
    one.drop_layer(one.memory, 1, "none")
    assert one.peak_bytes == state + 1000  # its backward runs
    one.peak_bytes = 0
    one.check()
    assert one.peak_bytes == state
