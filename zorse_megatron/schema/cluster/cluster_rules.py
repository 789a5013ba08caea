"""Validate values of a cluster file against each other; report all breaches at once."""

from collections import Counter
from collections.abc import Iterable, Iterator

from zorse_megatron.errors import Problem
from zorse_megatron.schema.cluster.cloud_instances import INSTANCES
from zorse_megatron.schema.cluster.cluster_file import ClusterFile, GpuKindEntry, NodesEntry
from zorse_megatron.schema.cluster.network_rules import network_problems
from zorse_megatron.schema.cluster.resolve import (
    gpu_kinds_in,
    kind_name,
    kinds_of,
    node_names,
    slowest_link,
)
from zorse_megatron.schema.gpus.device_names import kind_of_device
from zorse_megatron.schema.gpus.gpu_names import is_foreign, unknown_kind
from zorse_megatron.schema.gpus.gpu_presets import GPU_KINDS
from zorse_megatron.schema.text.suggest import did_you_mean

# Far above any cluster there is; a count with a digit too many must not fill the memory.
MAX_GPUS = 1_000_000
_MAX_GPUS_PER_NODE = 256
_WELL_KNOWN = tuple(name for name in GPU_KINDS if not is_foreign(name))


def problems_of(file: ClusterFile) -> Iterator[Problem]:
    """Yield every breach of the rules."""
    yield from _gpu_kinds(file)
    for index, node in enumerate(file.nodes):
        yield from _node(file, node, f"nodes[{index}]")
        yield from _link(file, node, f"nodes[{index}]")
    yield from _size(file)
    yield from _names(file)
    yield from network_problems(file)


def _known_kinds(file: ClusterFile) -> dict[str, None]:
    """Return the names that nodes may use, those of the file first."""
    own = [entry.name for entry in file.gpu_kinds]
    return dict.fromkeys([*own, *_WELL_KNOWN])


def _may_be_used(file: ClusterFile, name: str) -> bool:
    return kind_name(file, name) in _known_kinds(file)


def _gpu_kinds(file: ClusterFile) -> Iterator[Problem]:
    yield from repeated((entry.name for entry in file.gpu_kinds), "gpu_kinds", "kind")
    for index, entry in enumerate(file.gpu_kinds):
        where = f"gpu_kinds[{index}]"
        if entry.like is not None and kind_of_device(entry.like) not in _WELL_KNOWN:
            expected = "a kind that gives the values that are left out"
            yield unknown_kind(entry.like, f"{where}.like", _WELL_KNOWN, expected=expected)
        elif entry.like is None and kind_of_device(entry.name) not in GPU_KINDS:
            yield from _incomplete_kind(entry, where)


def _incomplete_kind(entry: GpuKindEntry, where: str) -> Iterator[Problem]:
    absent = [key for key in ("memory", "memory_bandwidth", "peak") if getattr(entry, key) is None]
    if entry.peak is not None and entry.peak.float32 is None:
        absent.append("peak.float32")
    if absent:
        yield Problem(
            where=where,
            found=f'kind "{entry.name}" without {", ".join(absent)}',
            expected="every value of a kind that is not well known",
            remedy=f'Add them, or add "like" with the closest of {", ".join(_WELL_KNOWN)}.',
        )


def _node(file: ClusterFile, node: NodesEntry, where: str) -> Iterator[Problem]:
    if node.instance is not None and node.instance not in INSTANCES:
        yield Problem(
            where=f"{where}.instance",
            found=f'"{node.instance}", which is not a known cloud instance',
            expected="one of the instances of docs/cluster-file.md",
            remedy=did_you_mean(node.instance, INSTANCES)
            + " Or describe the node with gpus, link and nics.",
        )
    if node.instance is None and node.gpus is None:
        yield Problem(
            where=where,
            found="a node without gpus",
            expected="gpus or instance",
            remedy="Say what is in it, such as gpus: 8 x A100-40.",
        )
    for index, entry in enumerate(node.gpus or ()):
        if not _may_be_used(file, entry.kind):
            yield unknown_kind(
                entry.kind,
                f"{where}.gpus[{index}].kind",
                _known_kinds(file),
                expected="a well-known kind or one of gpu_kinds",
            )
    numbers = node.gpu_numbers
    if numbers is not None and (len(set(numbers)), len(numbers)) != (gpus_in(node),) * 2:
        yield Problem(
            where=f"{where}.gpu_numbers",
            found=f"{list(numbers)}, for {gpus_in(node)} GPUs",
            expected="one number for each GPU, each once",
            remedy="Take those of nvidia-smi, in the order of gpus; leave it out for 0, 1, 2, ...",
        )


def _link(file: ClusterFile, node: NodesEntry, where: str) -> Iterator[Problem]:
    """A type of link that is not usual for the GPUs needs its bandwidth."""
    if node.link is None or node.link.bandwidth is not None or not _is_known(file, node):
        return
    kinds = kinds_of(file)
    usual, _ = slowest_link([kinds[kind] for kind in dict.fromkeys(gpu_kinds_in(file, node))])
    if node.link.type != usual:
        yield Problem(
            where=f"{where}.link",
            found=f"{node.link.type} without bandwidth, where {usual} is usual",
            expected="the bandwidth of what is not usual for the kind of GPU",
            remedy=f"Add it, such as link: {node.link.type} 20 GB/s.",
        )


def _is_known(file: ClusterFile, node: NodesEntry) -> bool:
    if node.gpus is None:
        return node.instance in INSTANCES
    return gpus_in(node) <= _MAX_GPUS_PER_NODE and all(
        _may_be_used(file, entry.kind) for entry in node.gpus
    )


def _size(file: ClusterFile) -> Iterator[Problem]:
    for index, node in enumerate(file.nodes):
        if gpus_in(node) > _MAX_GPUS_PER_NODE:
            yield Problem(
                where=f"nodes[{index}].gpus",
                found=f"{gpus_in(node)} GPUs in one node",
                expected=f"at most {_MAX_GPUS_PER_NODE}",
                remedy="Use count for the number of nodes, gpus for those in one node.",
            )
    total = sum(node.count * gpus_in(node) for node in file.nodes)
    if total > MAX_GPUS:
        yield Problem(
            where="nodes",
            found=f"{total} GPUs",
            expected=f"at most {MAX_GPUS}",
            remedy="Check the counts.",
        )
    elif len(file.nodes) > 1 or file.nodes[0].count > 1:
        for index, node in enumerate(file.nodes):
            if node.nics is None and node.instance is None:
                yield Problem(
                    where=f"nodes[{index}]",
                    found="a node without nics beside other nodes",
                    expected="the network adapters of every node",
                    remedy="Add them, such as nics: 100 Gb/s or nics: 4 x 100 Gb/s.",
                )


def gpus_in(node: NodesEntry) -> int:
    """Return the number of GPUs of one such node; 0 where that is not known."""
    if node.gpus is not None:
        return sum(entry.count for entry in node.gpus)
    instance = INSTANCES.get(node.instance or "")
    return instance.gpu_count if instance else 0


def _names(file: ClusterFile) -> Iterator[Problem]:
    problems = list(repeated((node.name for node in file.nodes if node.name), "nodes", "node"))
    yield from problems
    if problems or sum(node.count for node in file.nodes) > MAX_GPUS:
        return
    # With their numbers: `a` with count 2 makes an a-1, too.
    twice = [name for name, count in Counter(node_names(file)).items() if count > 1]
    if twice:
        more = f" (and {len(twice) - 1} other names twice)" if len(twice) > 1 else ""
        yield Problem(
            where="nodes",
            found=f'2 nodes with the name "{twice[0]}"{more}',
            expected="a different name for every node, with the numbers that count and the order "
            "give them",
            remedy="Rename the entry that has the number in its name.",
        )


def repeated(names: Iterable[str], where: str, noun: str) -> Iterator[Problem]:
    """Yield a Problem for each name that comes more than once."""
    for name, count in Counter(names).items():
        if count > 1:
            yield Problem(
                where=where,
                found=f'{count} entries with the name "{name}"',
                expected=f"a different name for every {noun}",
                remedy="Rename them; count makes equal nodes." if noun == "node" else "Rename one.",
            )
