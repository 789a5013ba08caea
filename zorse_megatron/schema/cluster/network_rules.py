"""The rules of a cluster file about switches and regions."""

from collections.abc import Iterator

import networkx as nx

from zorse_megatron.errors import Problem
from zorse_megatron.schema.cluster.cluster_file import ClusterFile, SwitchEntry
from zorse_megatron.schema.cluster.resolve import (
    ONLY_REGION,
    first_region,
    region_of,
    regions_of,
)
from zorse_megatron.schema.text.suggest import did_you_mean

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
        above = switch.uplink.to if switch.uplink else None
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
    if None in pairs:  # the entry for all pairs
        return
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
