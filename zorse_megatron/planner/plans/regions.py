"""Regions of replicas, for the plan file, so that samples stay in theirs."""

from dataclasses import replace

from zorse_megatron.schema.plan.plan import Group, Plan, Replica
from zorse_megatron.topology.cluster_topology import Topology


def with_regions(plan: Plan, spec: Topology) -> Plan:
    """The plan with each replica's region, if any group has replicas in several."""

    def region_of(replica: Replica) -> str:
        return spec.nodes[spec.node_of(replica.ranks[0])].region

    def placed(group: Group) -> Group:
        replicas = tuple(replace(each, region=region_of(each)) for each in group.replicas)
        return replace(group, replicas=replicas)

    if all(len({region_of(each) for each in group.replicas}) == 1 for group in plan.groups):
        return plan
    return replace(plan, groups=tuple(map(placed, plan.groups)))
