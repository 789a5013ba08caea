"""Stops a job at its start where a rank is not on the GPU, or not on the node, of the plan."""

import os

import torch

from zorse_megatron.adapter.plan_run import PlanRun
from zorse_megatron.errors import PlanError
from zorse_megatron.log import say
from zorse_megatron.runtime.collectives import gathered
from zorse_megatron.schema.cluster.rank_placement import (
    RankLocation,
    placement_problems,
    unchecked_kinds,
)
from zorse_megatron.schema.gpus.device_names import GPU_KIND, kind_of_device
from zorse_megatron.schema.gpus.gpu_presets import canonical_kind


def check_placement(run: PlanRun) -> None:
    """Compare where all ranks are with the plan and the cluster file; a collective call.

    Raises PlanError on every rank, with all that are elsewhere.
    """
    mine = _found(run.node)
    found = gathered(mine)
    kinds = run.plan.cluster.gpu_kinds if run.plan.cluster else None
    nodes = None
    if run.cluster is not None:
        kinds = kinds or run.cluster.gpu_kinds
        nodes = [node.name for node in run.cluster.nodes for _ in node.ranks]
    problems = placement_problems(found, kinds=kinds, nodes=nodes)
    if problems:
        raise PlanError("The ranks are not on the GPUs of the plan", problems)
    unchecked = unchecked_kinds(kinds or ()) if mine.gpu_kind and not mine.is_declared else []
    if unchecked:
        say(f"not well known, so not compared with the GPUs of the ranks: {', '.join(unchecked)}")


def _found(node: str) -> RankLocation:
    declared = os.environ.get(GPU_KIND)
    if declared:
        return RankLocation(node=node, gpu_kind=canonical_kind(declared), is_declared=True)
    if not torch.cuda.is_available():  # as in CPU mode
        return RankLocation(node=node, gpu_kind=None)
    gpu = torch.cuda.get_device_properties()
    return RankLocation(node=node, gpu_kind=kind_of_device(gpu.name, gpu.total_memory))
