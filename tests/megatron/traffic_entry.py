"""`recording_entry`, with the bytes counted that the runtime hands to torch.distributed.

Writes `traffic-rank<R>.json` to `$ZORSE_TEST_RECORD`: `steps`, for each training step what this
rank sent and received of parameters, gradients and activations (a broadcast or a reduction counts
once for each other rank of the group) and copied to and from the host, and `chunks`, the elements
of each of its chunks' buffers.
"""

import functools
import json
import os
from collections import Counter
from collections.abc import Callable
from typing import Any

from tests.megatron import recording_entry
from zorse_megatron.adapter import cpu_mode


class CountingDist:
    """torch.distributed, with some of its calls counted."""

    def __init__(self, counts: Counter[str]) -> None:
        import torch.distributed

        self._dist = torch.distributed
        self._counts = counts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dist, name)

    def broadcast(self, tensor: Any, *, group: Any, group_src: int, async_op: bool) -> Any:
        self._count("parameters", tensor, group, sends=group.rank() == group_src)
        return self._dist.broadcast(tensor, group=group, group_src=group_src, async_op=async_op)

    def reduce(self, tensor: Any, *, group: Any, group_dst: int, async_op: bool) -> Any:
        self._count("gradients", tensor, group, sends=group.rank() != group_dst)
        return self._dist.reduce(tensor, group=group, group_dst=group_dst, async_op=async_op)

    def all_to_all_single(self, received: Any, sent: Any, *args: Any, **kwargs: Any) -> Any:
        self._counts["gradients sent"] += sent.nbytes
        self._counts["gradients received"] += received.nbytes
        return self._dist.all_to_all_single(received, sent, *args, **kwargs)

    def isend(self, tensor: Any, **kwargs: Any) -> Any:
        self._counts["activations sent"] += tensor.nbytes
        return self._dist.isend(tensor, **kwargs)

    def irecv(self, tensor: Any, **kwargs: Any) -> Any:
        self._counts["activations received"] += tensor.nbytes
        return self._dist.irecv(tensor, **kwargs)

    def _count(self, what: str, tensor: Any, group: Any, *, sends: bool) -> None:
        # The owner of a part has one message with each of the others.
        owner = sends if what == "parameters" else not sends
        messages = group.size() - 1 if owner else 1
        self._counts[f"{what} {'sent' if sends else 'received'}"] += tensor.nbytes * messages


def counting_copy(copy: Callable[..., Any], counts: Counter[str], what: str) -> Callable[..., Any]:
    def start(link: Any, source: Any, target: Any) -> Any:
        counts[what] += source.nbytes
        return copy(link, source, target)

    return start


def counting_train_step(
    train_step: Callable[..., Any], counts: Counter[str], found: dict[str, Any]
) -> Callable[..., Any]:
    @functools.wraps(train_step)
    def step(forward_step: Any, data_iterator: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        before = counts.copy()
        result = train_step(forward_step, data_iterator, model, *args, **kwargs)
        found["steps"].append({key: counts[key] - before[key] for key in counts})
        found["chunks"] = [
            {
                "elements": sum(buffer.numel for buffer in chunk.buffers),
                "parameters": sum(parameter.numel() for parameter in chunk.params_with_grad),
            }
            for chunk in model
        ]
        path = recording_entry.RECORD / f"traffic-rank{os.environ['RANK']}.json"
        path.write_text(json.dumps(found))
        return result

    return step


def main() -> None:
    if cpu_mode.needed():
        cpu_mode.enable()
    from megatron.training import training

    from zorse_megatron.runtime import (
        collectives,
        hierarchical_collectives,
        mixed_tp_exchange,
        transport,
    )
    from zorse_megatron.runtime.host_link import HostLink

    counts: Counter[str] = Counter()
    for name, what in (("start_to_host", "to the host"), ("start_from_host", "from the host")):
        setattr(HostLink, name, counting_copy(getattr(HostLink, name), counts, what))
    dist: Any = CountingDist(counts)
    collectives.dist = hierarchical_collectives.dist = transport.dist = mixed_tp_exchange.dist = (
        dist
    )
    found: dict[str, Any] = {"steps": [], "chunks": []}
    training.train_step = counting_train_step(training.train_step, counts, found)
    recording_entry.record()


if __name__ == "__main__":
    main()
