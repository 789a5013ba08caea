"""Reductions and gathers of hierarchical groups: stages on two streams.

What the stages are is said in `hierarchical_work`. One operation's messages between regions are on
their way while the regions work on the next one.
"""

from collections import Counter

from zorse_megatron.schedules.actions import Action, Kind
from zorse_megatron.simulate.collective_tasks import CollectiveTasks, Stage
from zorse_megatron.simulate.streams import Streams
from zorse_megatron.simulate.task_graph import live


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

    def join(self, position: int, action: Action, *after: int) -> int:
        """Take part in all stages, which begin when the main stream gets there; returns the end."""
        kind, chunk, streams = action.kind, action.chunk, self.streams
        assert chunk is not None
        first = self.sizes.peers_of(streams.rank, chunk)[0]
        number = self.counts[kind, chunk]
        self.counts[kind, chunk] += 1
        owner, track, tasks = (streams.rank, position), streams.track, self.collectives

        def stage(name: Stage, *earlier: int) -> int:
            task = tasks.join((kind, chunk, number, first, name), owner, *live(earlier))
            track.communication.append(task)
            return task

        if kind is Kind.REDUCE:
            start = stage("alone", streams.main, streams.inside, *after)
            streams.inside = stage("inside", start)
            streams.between = stage("between", start, streams.between)
            done = stage("done", streams.inside, streams.between)
        else:
            start = stage("between", streams.main, streams.between, *after)
            inside = stage("inside", streams.main, streams.inside, *after)
            streams.between = start
            streams.inside = done = stage("alone", inside, start)
        track.starts[position] = start
        return done
