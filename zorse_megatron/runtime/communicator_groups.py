"""Process groups of NCCL's communicators: with few channels each, and connected without a sum.

All ranks call `new_group` for every group in one order, also for those that they are not in: torch
names a group by the number of the call, talks to nobody for a group that the rank is not in (1,890
of them take 0.06 s), and waits for nobody (`TORCH_DIST_INIT_BARRIER` is off). With
`use_local_synchronization` the name would be a hash of the ranks and of the number of groups that
*this* process has (`_hash_ranks_to_str`), which differs between the ranks of a plan, so that they
would wait for each other under two names.
"""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from zorse_megatron.schedules.communicators import WORLD_CTAS
from zorse_megatron.schedules.links import Link, in_rounds


def nccl_options(channels: int | None, timeout: timedelta | None) -> Any:
    """Return what limits a communicator to so many channels; None: NCCL decides.

    A channel is a CTA of each kernel and its own buffers (maxCTAs of NCCL's configuration).
    `timeout`: as `new_group` gets it, which warns of any other one in the options.
    """
    if channels is None:
        return None
    options = dist.ProcessGroupNCCL.Options()
    if timeout is not None:
        options._timeout = timeout
    options.config.max_ctas = channels
    return options


def world_options(backend: str, timeout: timedelta | None) -> Any:
    """Return the options of the group of all ranks, which stock would leave to NCCL."""
    return nccl_options(WORLD_CTAS, timeout) if backend == "nccl" else None


def link_groups(
    links: Sequence[Link], *, rank: int, timeout: timedelta | None, channels: Mapping[Link, int]
) -> dict[Link, dist.ProcessGroup]:
    """Make the two-rank groups of all links; a collective call. Returns those of this rank.

    `links`: the same on all ranks, in the same order; `channels`: of those that are limited.
    """
    groups = {
        link: dist.new_group(
            list(link), timeout=timeout, pg_options=nccl_options(channels.get(link), timeout)
        )
        for link in links
    }
    return {link: group for link, group in groups.items() if rank in link}


def connect(
    groups: Mapping[Link, dist.ProcessGroup],
    *,
    all_links: Sequence[Link],
    rank: int,
    device: torch.device,
) -> None:
    """Let the ends of this rank's links meet, by one message along each, as they will carry.

    A sum would make rings and trees in both directions, with their buffers. Meeting blocks the
    host, so all ranks go through the links of the job in one order (`in_rounds`), in which pairs
    that have nothing to do with each other meet at the same time.
    """
    for source, target in in_rounds(all_links):
        if (source, target) not in groups:
            continue
        operation, peer = (dist.isend, target) if rank == source else (dist.irecv, source)
        message = torch.zeros(1, device=device)
        group = groups[source, target]
        for work in dist.batch_isend_irecv([dist.P2POp(operation, message, peer, group)]):
            work.wait()
