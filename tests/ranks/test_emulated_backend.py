"""The backend `emulated` on real ranks: gloo's results, at the emulated links' times."""

from contextlib import nullcontext

import torch
import torch.distributed as dist

from tests.ranks.harness import run_ranks
from tests.unit.fake_costs import FakeComm
from zorse_megatron.emulate.conductor import RankClock, call, conducted
from zorse_megatron.emulate.link_clock import LinkModel
from zorse_megatron.emulate.on_ranks.backend import BACKEND, register
from zorse_megatron.runtime.collectives import all_gather_uneven, reduce_scatter_uneven
from zorse_megatron.runtime.hierarchical_collectives import (
    CommDtype,
    RegionGroups,
    all_gather_hierarchical,
    reduce_scatter_hierarchical,
    reduce_scatter_low_precision,
)

WORLD = 3
# A ring moves (n - 1) / n of a buffer at this rate; so 12 bytes take 2 s over three ranks.
COMM = FakeComm(bytes_per_s=4.0, statistic_s=1000.0)


class OwnSizes:
    """Stands in for `ModelSizes`: each tensor for itself."""

    sharing = None

    def message_bytes(self, tensor):
        return tensor.nbytes

    buffer_bytes = message_bytes

    def part_bytes(self, parts):
        return [part.nbytes for part in parts]

    def on_operation(self):
        """Nobody is told."""

    def is_tp_group(self, ranks):
        return False


def emulated(body, world=WORLD):
    """Run `body(clock)` on ranks whose world is an emulated one."""
    return run_ranks(world, _in_emulated_world, body)


def _in_emulated_world(body):
    """The conductor is a thread of rank 0, as a process with threads must not be forked."""
    model = LinkModel(COMM, range(dist.get_world_size()))
    with conducted(model) if dist.get_rank() == 0 else nullcontext() as address:
        addresses = [address]
        dist.broadcast_object_list(addresses)
        found = _with_clock(body, addresses[0])
        dist.barrier()
    return found


def _with_clock(body, address):
    rank, world = dist.get_rank(), dist.get_world_size()
    dist.barrier()
    dist.destroy_process_group()
    clock = RankClock(call(address, rank))
    register(clock, OwnSizes())
    store = dist.FileStore(f"{address}-store", world)
    dist.init_process_group(BACKEND, rank=rank, world_size=world, store=store)
    before = torch.ones(2)
    dist.all_reduce(before)  # the clock does not run yet
    assert before.tolist() == [world, world]
    assert clock.now_s == 0.0
    clock.start()
    found = body(clock)
    clock.finish()
    return found


def each_collective(clock):
    """(result, seconds that it took) of collectives over buffers of 12 bytes."""
    rank, found = dist.get_rank(), {}

    def note(name, tensor):
        found[name] = tensor.tolist(), round(clock.now_s - note.before_s, 6)
        note.before_s = clock.now_s

    note.before_s = 0.0
    tensor = torch.full((3,), rank + 1.0)
    dist.all_reduce(tensor)
    note("all_reduce", tensor)
    whole = torch.empty(3)
    dist.all_gather_single(whole, torch.tensor([rank + 1.0]))
    note("all_gather", whole)
    part = torch.empty(1)
    dist.reduce_scatter_single(part, torch.arange(3.0) + rank)
    note("reduce_scatter", part)
    parts = [torch.empty(1) for _ in range(3)]
    dist.all_gather(parts, torch.tensor([rank * 2.0]))
    note("all_gather of lists", torch.cat(parts))
    tensor = torch.full((3,), float(rank))
    dist.broadcast(tensor, 2)
    note("broadcast", tensor)
    return found


def test_collectives_compute_what_gloo_does_in_the_ring_s_time():
    answers = emulated(each_collective)
    for rank, found in enumerate(answers):
        assert found["all_reduce"] == ([6.0] * 3, 4.0)
        assert found["all_gather"] == ([1.0, 2.0, 3.0], 2.0)
        assert found["reduce_scatter"] == ([3.0 * rank + 3.0], 2.0)
        assert found["all_gather of lists"] == ([0.0, 2.0, 4.0], 2.0)
        assert found["broadcast"] == ([2.0] * 3, 500.0)


def overlapped(clock):
    """Send 80 bytes (20 s) while computing 15 s, then receive what the neighbour sent."""
    rank, world = dist.get_rank(), dist.get_world_size()
    message, coming = torch.full((20,), float(rank)), torch.empty(20)
    works = [
        dist.isend(message, (rank + 1) % world),
        dist.irecv(coming, (rank - 1) % world),
    ]
    clock.compute(15.0)
    at_15 = clock.now_s
    for work in reversed(works):
        work.wait()
    return at_15, clock.now_s, coming[0].item()


def test_asynchronous_operations_overlap_with_computation():
    for rank, found in enumerate(emulated(overlapped)):
        assert found == (15.0, 20.0, (rank - 1) % WORLD)


def on_two_groups(clock):
    """Groups are streams of their own; one that is busy does not hold up another."""
    groups = [dist.new_group([0, 1]), dist.new_group([0, 2])]
    if dist.get_rank() > 0:
        works = [dist.all_reduce(torch.ones(10), group=groups[dist.get_rank() - 1], async_op=True)]
    else:
        works = [dist.all_reduce(torch.ones(10), group=group, async_op=True) for group in groups]
    for work in works:
        work.wait()
    return clock.now_s


def test_groups_do_not_wait_for_each_other():
    # 40 bytes, half of them twice, at 4 bytes/s.
    assert emulated(on_two_groups) == [10.0, 10.0, 10.0]


def reduction_in_16_bits(clock):
    """6 elements, two of each rank, in 16 bits: each owner takes 4 bytes from two others."""
    rank = dist.get_rank()
    full = torch.arange(6.0) + rank
    work = reduce_scatter_low_precision(
        full,
        ((0, 2), (2, 4), (4, 6)),
        dist.group.WORLD,
        CommDtype(dtype=torch.bfloat16),
    )
    clock.compute(0.5)
    work.wait()
    return clock.now_s, full[2 * rank : 2 * rank + 2].tolist()


def test_a_reduction_in_16_bits_takes_the_time_of_an_exchange():
    for rank, found in enumerate(emulated(reduction_in_16_bits)):
        assert found == (2.0, [6.0 * rank + 3.0, 6.0 * rank + 6.0])


def uneven_shards(clock):
    """24 bytes, of which rank 0 owns 8 and rank 2 16: over gloo that is two calls each."""
    rank, bounds = dist.get_rank(), ((0, 2), (2, 2), (2, 6))
    full = torch.arange(6.0) + rank
    before_s = clock.now_s
    reduce_scatter_uneven(full, bounds, dist.group.WORLD).wait()
    reduced_s = clock.now_s
    all_gather_uneven(full, bounds, dist.group.WORLD).wait()
    return reduced_s - before_s, clock.now_s - reduced_s, full.tolist()


def test_shards_of_unequal_size_are_moved_in_one_operation():
    """A ring takes 4 s for 24 bytes; each of gloo's calls alone would take 500 s."""
    for found in emulated(uneven_shards):
        assert found == (4.0, 4.0, [3.0, 6.0, 9.0, 12.0, 15.0, 18.0])


def two_levels(clock):
    """Ranks 0 and 1, and 2 and 3, with 16 elements: two reductions, then a gather, at once."""
    rank = dist.get_rank()
    insides = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    groups = RegionGroups(
        inside=insides[rank // 2], across=dist.new_group(), regions=((0, 2), (2, 4))
    )
    bounds = ((0, 4), (4, 8), (8, 12), (12, 16))
    buffers = [torch.arange(16.0) + rank for _ in range(2)]
    gathered = torch.full((16,), float(rank))
    works = [
        *(reduce_scatter_hierarchical(each, bounds, groups) for each in buffers),
        all_gather_hierarchical(gathered, bounds, groups),
    ]
    clock.compute(0.5)
    times_s = []
    for work in works:
        work.wait()
        times_s.append(clock.now_s)
    own = slice(4 * rank, 4 * rank + 4)
    return times_s, [each[own].tolist() for each in buffers], gathered.tolist()


def test_two_levels_are_stages_that_overlap_with_those_of_the_next_operation():
    """A ring of two moves half of a block of 32 bytes: 4 s. A rank sends 16 bytes: 4 s.

    Regions sum for others (until 4), then for themselves (8), and again (12, 16); messages leave
    at 4 and at 12. The gather's messages follow at 16, beside own shards, and are spread at 20.
    """
    for rank, (times_s, sums, gathered) in enumerate(emulated(two_levels, world=4)):
        assert times_s == [8.0, 16.0, 24.0]
        assert sums == [[4.0 * n + 6.0 for n in range(4 * rank, 4 * rank + 4)]] * 2
        assert gathered == [float(n // 4) for n in range(16)]
