"""A move to another plan with the state in memory: the request, who sends what to whom.

An owner under the new plan takes what it owned under the old one from itself, and of the rest every
element from the lowest rank that has it. Several may: a tied embedding has two copies, and both
have the same values. All ranks compute the same list, whose order is that of messages.

Needs neither torch nor Megatron: the ranks compute it from what each owns under either plan, and
so does a test.
"""

import errno
import stat
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from zorse_megatron.errors import ZorseError
from zorse_megatron.files.read_write import kind_of, read_input, write_text
from zorse_megatron.inputs.cluster import Cluster
from zorse_megatron.inputs.lora import parse_lora
from zorse_megatron.inputs.model import ModelShape
from zorse_megatron.plan.plan import Chunk, Plan, Replica
from zorse_megatron.plan.plan_file import dump_plan
from zorse_megatron.schedule.shards import intersection, shard_bounds
from zorse_megatron.schedule.tensor_parallel_parts import TensorBlock

Owned = Mapping[str, Sequence[TensorBlock]]
"""Parameter -> what a rank owns of it; blocks of one rank have no element in common."""
Owners = Mapping[int, Owned]
"""Rank -> what it owns."""


class MoveError(ZorseError):
    """State cannot be moved from one plan to another."""


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """A block of a parameter, and of each of its states, that one rank hands to another.

    To itself if they are the same: then it is not sent.
    """

    parameter: str
    block: TensorBlock
    source: int
    destination: int

    @property
    def is_sent(self) -> bool:
        """Whether it goes to another rank."""
        return self.source != self.destination


def plan_transfers(before: Owners, after: Owners) -> tuple[Transfer, ...]:
    """All that has to change hands, ordered by parameter, destination and its blocks.

    Every element that a rank owns `after` is in exactly one transfer to it. Raises MoveError where
    nobody owned an element `before`.
    """
    names = sorted({name for owned in after.values() for name in owned})
    holders: dict[str, list[tuple[int, TensorBlock]]] = {name: [] for name in names}
    for rank in sorted(before):
        for name, blocks in before[rank].items():
            if name in holders:
                holders[name] += [(rank, block) for block in blocks]
    return tuple(
        transfer
        for name in names
        for rank in sorted(after)
        for block in after[rank].get(name, ())
        for transfer in _to(rank, name, block, holders[name])
    )


def _to(
    rank: int, name: str, wanted: TensorBlock, holders: Sequence[tuple[int, TensorBlock]]
) -> Iterator[Transfer]:
    """Where one owner has one block from."""
    missing = [wanted]
    # Its own first; otherwise the order of ranks, as the sort is stable.
    for source, held in sorted(holders, key=lambda holder: holder[0] != rank):
        left: list[TensorBlock] = []
        for block in missing:
            both = common_block(block, held)
            if both is None:
                left.append(block)
                continue
            yield Transfer(parameter=name, block=both, source=source, destination=rank)
            left += without(block, both)
        missing = left
    if missing:
        raise MoveError.of(
            "State cannot be moved to the new plan",
            where=f"parameter {name}",
            found=f"no owner of {missing[0]}, which rank {rank} is to own",
            expected="an owner of every element under the plan that has been run",
            remedy="Save a checkpoint, and start the new plan from it.",
        )


# What two blocks of a tensor have in common, and what is left of one without the other.


def common_block(first: TensorBlock, second: TensorBlock) -> TensorBlock | None:
    """The elements in both blocks, or None when there are none.

    >>> common_block(TensorBlock(offset=(0,), size=(4,)), TensorBlock(offset=(3,), size=(4,)))
    TensorBlock(offset=(3,), size=(1,))
    """
    sides = []
    for axis, start in enumerate(first.offset):
        mine = start, start + first.size[axis]
        theirs = second.offset[axis], second.offset[axis] + second.size[axis]
        both = intersection(mine, theirs)
        if both is None:
            return None
        sides.append(both)
    return TensorBlock(
        offset=tuple(start for start, _ in sides),
        size=tuple(stop - start for start, stop in sides),
    )


def without(block: TensorBlock, taken: TensorBlock) -> Iterator[TensorBlock]:
    """The elements of `block` that are not in `taken`, which lies inside it, as blocks.

    >>> [(b.offset, b.size) for b in without(
    ...     TensorBlock(offset=(0, 0), size=(4, 4)), TensorBlock(offset=(1, 0), size=(3, 2)))]
    [((0, 0), (1, 4)), ((1, 2), (3, 2))]
    """
    offset, size = list(block.offset), list(block.size)
    for axis, (start, length) in enumerate(zip(taken.offset, taken.size, strict=True)):
        stop = start + length
        for first, last in ((offset[axis], start), (stop, offset[axis] + size[axis])):
            if first < last:
                rest, rest_size = list(offset), list(size)
                rest[axis], rest_size[axis] = first, last - first
                yield TensorBlock(offset=tuple(rest), size=tuple(rest_size))
        offset[axis], size[axis] = start, length


# What a move takes, before it is made: bytes sent, and the most that a rank holds in host memory.
#
# A parameter's states (main parameter, first and second moment) are moved one after the other,
# parameter by parameter. `state_bytes`: what an element takes in each of them.


def elements(owned: Owned) -> int:
    """All that a rank owns."""
    return sum(block.numel for blocks in owned.values() for block in blocks)


def moved_bytes(
    transfers: Iterable[Transfer], state_bytes: Sequence[int]
) -> tuple[Counter[int], Counter[int]]:
    """Rank -> bytes that it sends to others; and rank -> bytes that it gets from them."""
    sent, received = Counter[int](), Counter[int]()
    for each in transfers:
        if each.is_sent:
            num_bytes = each.block.numel * sum(state_bytes)
            sent[each.source] += num_bytes
            received[each.destination] += num_bytes
    return sent, received


def peak_bytes(
    rank: int, owned: Owned, transfers: Iterable[Transfer], state_bytes: Sequence[int]
) -> int:
    """The most bytes of host memory that a move takes on a rank.

    The rank has set aside all that it owned under the old plan, and lets a parameter go when it
    is done with it. While one state of a parameter is moved there is beside it what comes from
    other ranks, and a copy of what is sent to them.
    """
    passing: Counter[str] = Counter()
    for each in transfers:
        if each.is_sent and rank in (each.source, each.destination):
            passing[each.parameter] += each.block.numel
    of_parameter = {name: sum(block.numel for block in owned[name]) for name in owned}
    aside = sum(of_parameter.values()) * sum(state_bytes)
    highest = aside
    for name in sorted({*passing, *of_parameter}):
        highest = max(highest, aside + passing[name] * max(state_bytes))
        aside -= of_parameter.get(name, 0) * sum(state_bytes)
    return highest


# A request to a run: the next plan, as a file in the directory of its status.


REQUEST_NAME = "next-plan.json"
_TAKEN_NAME = "next-plan.taken.json"


def make_request(directory: Path, plan: Plan) -> Path:
    """Ask the run that keeps its status there to go on under a plan; returns the file.

    Takes the place of a request that the run has not read yet. Raises OutputError.
    """
    return write_text(directory / REQUEST_NAME, dump_plan(plan), follows_link=False)


def take_request(directory: Path) -> bytes | None:
    """What has been asked for since the last call, and take it away; None: nothing.

    b"" for a file that cannot be read, which is no plan. Raises MoveError for what is no file,
    which stays.
    """
    request, taken = directory / REQUEST_NAME, directory / _TAKEN_NAME
    try:
        mode = request.lstat().st_mode
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, kind_of(mode))
        # Renamed before it is read: a request that takes its place meanwhile is another one.
        request.rename(taken)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise MoveError.of(
            "no plan can be asked for",
            where=str(request),
            found=error.strerror or str(error),
            expected="a plan file, as zorse move writes it, or none",
            remedy=f"Remove it, and {_TAKEN_NAME} if that is there; ask with zorse move.",
        ) from error
    try:
        data = read_input(taken)
        taken.unlink()
    except OSError:
        return b""
    return data


# How long a move takes: what changes hands, over the links between nodes, and the rest.
#
# Who owns what is known to the byte only where the model is built (`adapter.moving`). Here a shard
# is a part of its chunk's layers in their order, which differs in the order of parameters within a
# layer, and a TP group's ranks own equal parts of what their replica owns; ranks that share experts
# alone own parts by their experts, and by their weights of all else.


# Of an element: main parameter and two moments, in fp32.
_STATE_BYTES = (4, 4, 4)


def move_s(
    before: Plan, after: Plan, model: ModelShape, cluster: Cluster, *, rebuild_s: float
) -> float:
    """Seconds that a move takes at the rates of the cluster file.

    State goes down to the host and up again, and between nodes through their adapters. Inside a
    node it is taken to cost nothing more. `rebuild_s`: building processes' groups, model and data.
    """
    old, new = owners(before, model), owners(after, model)
    between = [
        each
        for each in plan_transfers(old, new)
        if cluster.node_of_rank(each.source) != cluster.node_of_rank(each.destination)
    ]
    between_nodes = moved_bytes(between, _STATE_BYTES)
    busiest_s = [
        sum(way[rank] for rank in node.ranks) / node.nics.total_bytes_per_s
        for node in cluster.nodes
        if node.nics is not None
        for way in between_nodes
    ]
    return (
        rebuild_s
        + max(*busiest_s, _between_regions_s(between, cluster), 0.0)
        + _host_s(old, cluster)
        + _host_s(new, cluster)
    )


def owners(plan: Plan, model: ModelShape) -> Owners:
    """Who owns what of each layer, of the embedding and of the output layer, in flat intervals."""
    found: dict[int, dict[str, list[TensorBlock]]] = {rank: {} for rank in range(plan.world_size)}
    for number, chunk in enumerate(plan.chunks):
        parts = _parts(number, chunk, plan, model)
        replicas = plan.groups[chunk.group].replicas
        bounds = shard_bounds(sum(parts.values()), [each.shard_weight for each in replicas])
        for replica, (first, stop) in zip(replicas, bounds, strict=True):
            of_ranks = shard_bounds(stop - first, _shares_of_ranks(replica, model))
            for rank, (start, end) in zip(replica.ranks, of_ranks, strict=True):
                for name, block in _blocks(parts, first + start, first + end):
                    found[rank].setdefault(name, []).append(block)
    return found


def _shares_of_ranks(replica: Replica, model: ModelShape) -> list[float]:
    """Of what their replica owns."""
    shared = replica.expert_parallel
    if shared is None:
        return [1.0] * len(replica.ranks)
    experts = model.mlp_parameters / model.layer_parameters()
    return [
        experts * count / sum(shared.experts) + (1 - experts) * shared.weight_of(index)
        for index, count in enumerate(shared.experts)
    ]


def _parts(number: int, chunk: Chunk, plan: Plan, model: ModelShape) -> dict[str, int]:
    """Part of the chunk -> elements that are trained."""
    first, stop = chunk.layers
    lora = None if plan.model.lora is None else parse_lora(plan.model.lora, [])
    if lora is not None:
        return {f"layer {layer}": lora.layer_parameters(model) for layer in range(first, stop)}
    parts = {f"layer {n}": model.of_layer(n).layer_parameters() for n in range(first, stop)}
    if number == 0:
        parts = {"embedding": model.embedding_parameters(), **parts}
    if number == len(plan.chunks) - 1:
        parts["head"] = model.head_parameters()
    return parts


def _blocks(parts: dict[str, int], start: int, stop: int) -> Iterator[tuple[str, TensorBlock]]:
    """What elements [start, stop) of a chunk are of each of its parts."""
    first = 0
    for name, size in parts.items():
        low, high = max(start, first) - first, min(stop, first + size) - first
        if low < high:
            yield name, TensorBlock(offset=(low,), size=(high - low,))
        first += size


def _between_regions_s(between: Sequence[Transfer], cluster: Cluster) -> float:
    """All that goes from one region to another, over the slowest link of regions."""
    region = [cluster.node_of_rank(rank).region for rank in range(cluster.world_size)]
    far = [each for each in between if region[each.source] != region[each.destination]]
    if not far:
        return 0.0
    slowest = min(link.bandwidth_bytes_per_s for link in cluster.region_links)
    sent, _ = moved_bytes(far, _STATE_BYTES)
    return sent.total() / slowest


def _host_s(owners: Owners, cluster: Cluster) -> float:
    """All that a rank owns, between its GPU and the host; all ranks at once."""
    return max(
        elements(owned) * sum(_STATE_BYTES) / cluster.node_of_rank(rank).host_link_bytes_per_s
        for rank, owned in owners.items()
    )
