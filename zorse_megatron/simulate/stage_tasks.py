"""Reductions and gathers of hierarchical groups: stages on two streams.

What the stages are is said in `hierarchical_work`. One operation's messages between regions are on
their way while the regions work on the next one.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate

from zorse_megatron.schedules.actions import Action, Kind
from zorse_megatron.simulate.collective_tasks import CollectiveTasks
from zorse_megatron.simulate.layer_gathers import GatherPart
from zorse_megatron.simulate.network_loads import TaskWork
from zorse_megatron.simulate.streams import Streams
from zorse_megatron.simulate.task_graph import Role, live


class StageTasks:
    """Those of one rank."""

    def __init__(self, collectives: CollectiveTasks, streams: Streams) -> None:
        self.collectives = collectives
        self.sizes = collectives.costs.sizes
        self.streams = streams
        self.counts: Counter[tuple[Kind, int]] = Counter()

    def are_made(self, action: Action) -> bool:
        """Whether the action is one of several stages."""
        assert action.chunk is not None
        rank = self.streams.rank
        return (
            self.sizes.is_hierarchical(action.chunk)
            and len(self.sizes.peers_of(rank, action.chunk)) > 1
        )

    @property
    def before(self) -> tuple[int, ...]:
        """The last ones."""
        return live([self.streams.inside, self.streams.between])

    def join(
        self, position: int, action: Action, parts: Sequence[GatherPart], *after: int
    ) -> tuple[int, ...]:
        """Take part in all stages, which begin when the main stream gets there.

        Each region has stages of its own, messages are one stage of all. Returns for each part
        what ends it on this rank, which does not wait for the stages of other regions.
        """
        kind, chunk, streams = action.kind, action.chunk, self.streams
        assert chunk is not None
        peers = self.sizes.peers_of(streams.rank, chunk)
        key = kind, chunk, self.counts[kind, chunk], peers[0]
        self.counts[kind, chunk] += 1
        owner, track = (streams.rank, position), streams.track
        costs, ready = self.collectives.costs, (streams.main, *after)
        buffers, regions = costs.buffers(kind, chunk, peers)
        at = sorted(peers).index(streams.rank)
        region = next(n for n, (first, stop) in enumerate(regions) if first <= at < stop)

        def stage(name: str, work: TaskWork, *earlier: int) -> int:
            task = self.collectives.join_stage(key, name, owner, work, *live(earlier))
            track.communication.append(task)
            track.starts.setdefault(position, task)
            return task

        if kind is Kind.REDUCE:
            ready = (stage(f"sums of {region}", costs.sums_in_sets(chunk), *ready),)
        last_buffers = list(accumulate(part.buckets for part in parts[:-1]))
        ends: list[int] = []
        for number, buffer in enumerate(buffers):
            if number in last_buffers:
                ends.append(self._end_here(owner))
            foreign = f"{number} in {region} of others", buffer.foreign[region]
            own = f"{number} in {region}", buffer.own[region]
            between = f"{number}", buffer.between
            if kind is Kind.REDUCE:
                streams.inside = stage(*foreign, streams.inside, *ready)
                streams.between = stage(*between, streams.between, streams.inside)
                streams.inside = stage(*own, streams.inside)
            else:
                streams.between = stage(*between, streams.between, *ready)
                streams.inside = stage(*own, streams.inside, *ready)
                streams.inside = stage(*foreign, streams.inside, streams.between)
        self.collectives.note_stages(key)
        return (*ends, self._end_here(owner))

    def _end_here(self, owner: tuple[int, int]) -> int:
        streams = self.streams
        last = live([streams.inside, streams.between])
        return streams.graph.add(owner, Role.COLLECTIVE, 0.0, *last)
