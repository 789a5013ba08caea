"""What values of a cluster file must hold together, those of switches and regions among them."""

from collections import Counter
from collections.abc import Iterator

from zorse_megatron.errors import Problem
from zorse_megatron.files.wording import did_you_mean, repeated
from zorse_megatron.gpus.known_gpus import (
    GPU_KINDS,
    INSTANCES,
    is_foreign,
    kind_of_device,
    unknown_kind,
)
from zorse_megatron.inputs.cluster import (
    ONLY_REGION,
    first_region,
    gpu_kinds_in,
    kind_name,
    kinds_of,
    node_names,
    region_of,
    regions_of,
    slowest_link,
)
from zorse_megatron.inputs.cluster_file import ClusterFile, GpuKindEntry, NodesEntry, SwitchEntry

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
    yield from repeated((each.name for each in file.gpu_kinds), "gpu_kinds", "kind", "Rename one.")
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
    given, remedy = (node.name for node in file.nodes), "Rename them; count makes equal nodes."
    problems = list(repeated(filter(None, given), "nodes", "node", remedy))
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


# The rules of a cluster file about switches and regions.


_MAX_LISTED = 8


def network_problems(file: ClusterFile) -> Iterator[Problem]:
    """Yield every breach of the rules."""
    yield from _region_names(file)
    yield from _switch_names(file)
    yield from _node_switches(file)
    yield from _switch_trees(file)
    yield from _region_links(file)


def _region_names(file: ClusterFile) -> Iterator[Problem]:
    named = [node.region for node in file.nodes if node.region]
    if named and len(named) < len(file.nodes):
        for index, node in enumerate(file.nodes):
            if node.region is None:
                yield Problem(
                    where=f"nodes[{index}]",
                    found="a node without region beside nodes that have one",
                    expected="a region for every node or for none",
                    remedy=f"Add region, such as region: {named[0]}.",
                )
    for index, switch in enumerate(file.switches):
        region = switch.region or ONLY_REGION
        if region not in regions_of(file) and (switch.region or len(regions_of(file)) > 1):
            yield Problem(
                where=f"switches[{index}]",
                found=f'a switch in region "{region}"' if switch.region else "no region",
                expected="a region that has nodes: " + ", ".join(regions_of(file)),
                remedy=did_you_mean(region, regions_of(file)),
            )


def _switch_names(file: ClusterFile) -> Iterator[Problem]:
    names = [switch.name for switch in file.switches]
    for index, switch in enumerate(file.switches):
        if switch.name in names[:index]:
            yield Problem(
                where=f"switches[{index}].name",
                found=f'"{switch.name}" for a second time',
                expected="a different name for every switch",
                remedy="Rename one.",
            )
        above = _above(switch)
        if above is not None and above not in names:
            yield Problem(
                where=f"switches[{index}].uplink.to",
                found=f'"{above}", which is not in switches',
                expected="the name of another switch",
                remedy=did_you_mean(above, names) + " Without it the uplink leads to the core.",
            )


def _node_switches(file: ClusterFile) -> Iterator[Problem]:
    regions = {switch.name: region_of(file, switch) for switch in file.switches}
    for index, node in enumerate(file.nodes):
        region = node.region or first_region(file)
        if node.switch is None:
            continue
        if node.switch not in regions:
            yield Problem(
                where=f"nodes[{index}].switch",
                found=f'"{node.switch}", which is not in switches',
                expected="the name of a switch",
                remedy=did_you_mean(node.switch, regions) + " Or add it to switches.",
            )
        elif regions[node.switch] != region:
            yield Problem(
                where=f"nodes[{index}].switch",
                found=f'a node in region "{region}" at switch "{node.switch}" in region '
                f'"{regions[node.switch]}"',
                expected="a switch of the same region",
                remedy="Correct one of the regions.",
            )


def _switch_trees(file: ClusterFile) -> Iterator[Problem]:
    """Uplinks stay in the region and do not run in circles."""
    by_name = {switch.name: switch for switch in file.switches}
    for index, switch in enumerate(file.switches):
        above = by_name.get(_above(switch) or "")
        if above is not None and region_of(file, above) != region_of(file, switch):
            yield Problem(
                where=f"switches[{index}].uplink.to",
                found=f'"{above.name}", a switch of region "{region_of(file, above)}"',
                expected=f'a switch of region "{region_of(file, switch)}"',
                remedy="Describe the way to other regions under between_regions.",
            )
        if _is_in_circle(switch, by_name):
            yield Problem(
                where=f"switches[{index}].uplink.to",
                found=f'"{_above(switch)}", from which the uplinks lead back to "{switch.name}"',
                expected="uplinks that end at a switch without to",
                remedy="Remove to from the uplink of the topmost switch.",
            )


def _above(switch: SwitchEntry) -> str | None:
    return switch.uplink.to if switch.uplink else None


def _is_in_circle(switch: SwitchEntry, by_name: dict[str, SwitchEntry]) -> bool:
    seen: set[str] = set()
    name = _above(switch)
    while name is not None and name in by_name and name not in seen:
        if name == switch.name:
            return True
        seen.add(name)
        name = _above(by_name[name])
    return False


def _region_links(file: ClusterFile) -> Iterator[Problem]:
    """Entries are for two regions that exist, and join all regions."""
    regions = regions_of(file)
    seen: set[frozenset[str] | None] = set()
    for index, link in enumerate(file.between_regions):
        where = f"between_regions[{index}]"
        pair = None if link.regions is None else frozenset(link.regions)
        if link.regions is not None and (len(link.regions) != 2 or len(set(link.regions)) != 2):
            yield Problem(
                where=f"{where}.regions",
                found=f"[{', '.join(link.regions[:_MAX_LISTED])}]",
                expected="two different regions",
                remedy="Give one entry for each pair; without regions it is for all other pairs.",
            )
        for name in sorted(set(link.regions or ()) - set(regions)):
            yield Problem(
                where=f"{where}.regions",
                found=f'"{name}", where no node is',
                expected="regions that have nodes: " + ", ".join(regions),
                remedy=did_you_mean(name, regions),
            )
        if pair in seen:
            yield Problem(
                where=where,
                found="a second entry for the same regions",
                expected="one entry for each pair, and one for all others",
                remedy="Remove one of them.",
            )
        seen.add(pair)
    yield from _unjoined(regions, seen)


def _unjoined(regions: tuple[str, ...], pairs: set[frozenset[str] | None]) -> Iterator[Problem]:
    if None in pairs or len(regions) < 2:  # None: the entry for all pairs
        return
    import networkx as nx  # a quarter of the time in which a command starts

    graph = nx.Graph(tuple(pair) for pair in pairs if pair is not None and len(pair) == 2)
    graph.add_nodes_from(regions)
    parts = [sorted(part & set(regions)) for part in nx.connected_components(graph)]
    parts = sorted(part for part in parts if part)
    if len(parts) > 1:
        named = " | ".join(", ".join(part[:_MAX_LISTED]) for part in parts[:_MAX_LISTED])
        yield Problem(
            where="between_regions" if pairs else "top level",
            found=f"no link between the regions {named}",
            expected="links that join all regions",
            remedy="Add entries to between_regions, or one without regions for all pairs.",
        )
