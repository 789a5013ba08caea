"""Buffers whose memory comes and goes: nothing is lost, and nothing is held that is not counted."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zorse_megatron.runtime.host_link import HostLink
from zorse_megatron.runtime.sharded_buffer import ShardedBuffer


@st.composite
def owned_parts(draw):
    ends = sorted(draw(st.lists(st.integers(0, 40), max_size=8)))
    ends = ends[: len(ends) // 2 * 2]
    return 40, list(zip(ends[::2], ends[1::2], strict=True))


@given(owned_parts())
def test_owned_elements_survive_without_the_whole(case):
    size, owned = case
    values = torch.arange(float(size))
    buffer = ShardedBuffer(values.clone(), owned)
    view = buffer.full[3:9].view(2, 3)
    buffer.keep_shard()
    buffer.free()
    assert buffer.held_bytes == 4 * sum(stop - start for start, stop in owned)
    for start, stop in owned:
        assert torch.equal(buffer.piece(start, stop), values[start:stop])
    buffer.shard.mul_(2)
    buffer.restore()
    for start, stop in owned:
        assert torch.equal(buffer.full[start:stop], 2 * values[start:stop])
    assert view.data_ptr() == buffer.full.data_ptr() + 12  # views follow the new memory
    assert buffer.held_bytes == 4 * size  # the owned elements are in one place only


def test_pieces_show_the_whole_until_there_is_a_shard():
    buffer = ShardedBuffer(torch.zeros(10), [(2, 5), (7, 9)])
    buffer.piece(3, 5).fill_(1.0)
    assert buffer.full.tolist() == [0, 0, 0, 1, 1, 0, 0, 0, 0, 0]
    buffer.keep_shard()
    buffer.piece(7, 8).fill_(2.0)
    assert buffer.shard.tolist() == [0, 1, 1, 2, 0]
    assert buffer.full[7] == 0
    buffer.restore()
    assert buffer.piece(7, 8).tolist() == [2.0] == buffer.full[7:8].tolist()
    assert buffer.piece(6, 6).numel() == 0


@pytest.mark.parametrize("interval", [(1, 3), (4, 6), (5, 7), (4, 8), (9, 10)])
def test_elements_of_others_have_no_piece(interval):
    buffer = ShardedBuffer(torch.zeros(10), [(2, 5), (7, 9)])
    with pytest.raises(IndexError, match="expected some within one of"):
        buffer.piece(*interval)


@pytest.mark.parametrize("owned", [[(3, 2)], [(0, 5), (4, 6)], [(8, 11)]])
def test_bad_intervals_are_refused(owned):
    with pytest.raises(ValueError, match="ascending ones"):
        ShardedBuffer(torch.zeros(10), owned)


def test_a_view_of_something_larger_is_refused():
    with pytest.raises(ValueError, match="fills its"):
        ShardedBuffer(torch.zeros(10)[:5], [(0, 1)])


def test_a_shard_waits_in_the_host_and_is_copied_there_only_when_it_has_changed():
    link = HostLink(torch.device("cpu"))
    buffer = ShardedBuffer(torch.arange(10.0), [(2, 5), (7, 9)], link)
    buffer.keep_shard()
    buffer.free()
    buffer.offload()
    assert (buffer.held_bytes, link.host_bytes, link.sent_bytes) == (0, 20, 20)
    buffer.fetch()
    buffer.restore()
    assert buffer.full[2:5].tolist() == [2, 3, 4]
    buffer.keep_shard()
    buffer.free()
    buffer.offload()
    assert (buffer.held_bytes, link.sent_bytes, link.brought_bytes) == (0, 20, 20)
    buffer.fetch()
    buffer.piece(7, 9).fill_(-1)
    buffer.changed = True
    buffer.offload()
    buffer.restore()  # brings it back by itself
    assert buffer.full[7:9].tolist() == [-1, -1]
    assert link.sent_bytes == 40


@given(owned_parts(), st.booleans())
def test_elements_are_read_and_written_wherever_they_are(case, in_the_host):
    size, owned = case
    link = HostLink(torch.device("cpu"))
    buffer = ShardedBuffer(torch.arange(float(size)), owned, link)
    buffer.keep_shard()
    buffer.free()
    if in_the_host:
        buffer.offload()
    for start, stop in buffer.owned:
        assert buffer.read(start, stop).tolist() == list(range(start, stop))
        buffer.write(start, stop, -torch.arange(start, stop, dtype=torch.float64))
    held_bytes = 4 * buffer.num_owned
    assert (buffer.held_bytes, link.host_bytes) == (
        (0, held_bytes) if in_the_host else (held_bytes, 0)
    )
    buffer.restore()
    for start, stop in buffer.owned:
        assert torch.equal(buffer.full[start:stop], -torch.arange(float(start), float(stop)))


def test_a_checkpoint_is_never_given_all_bytes_that_wait_in_the_host():
    """Megatron's writer copies a part, but writes a whole storage while training goes on."""
    buffer = ShardedBuffer(torch.arange(10.0), [(2, 5)], HostLink(torch.device("cpu")))
    buffer.keep_shard()
    buffer.free()
    buffer.offload()
    part, whole = buffer.read(2, 4), buffer.read(2, 5)
    buffer.write(2, 5, torch.zeros(3))
    assert part.untyped_storage().nbytes() > part.nbytes
    assert whole.tolist() == [2, 3, 4]
