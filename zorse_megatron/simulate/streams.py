"""The streams of a rank, by their last tasks."""

from zorse_megatron.simulate.task_graph import NOTHING, Role, TaskGraph, Track


class Streams:
    """On each things run one at a time, in list order; the main one runs the list itself."""

    def __init__(self, *, rank: int, graph: TaskGraph, track: Track) -> None:
        self.rank = rank
        self.graph = graph
        self.track = track
        self.main = self.collective = self.to_host = self.from_host = NOTHING
        self.inside = self.between = NOTHING
        """Of a hierarchical group: within its regions, and between them."""

    def run(self, position: int, role: Role, seconds_s: float, *after: int) -> int:
        """Add a task to the main stream, which also waits for `after`."""
        owner = self.rank, position
        return self.on_main(self.graph.add(owner, role, seconds_s, self.main, *after))

    def on_main(self, task: int) -> int:
        """The main stream goes on when a task has ended."""
        self.main = task
        self.track.main.append(task)
        return task
