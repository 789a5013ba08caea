"""Forwards, backwards and weight gradients: tasks of the main stream."""

from collections.abc import Sequence

from zorse_megatron.schedules.actions import Action, Kind
from zorse_megatron.simulate.action_costs import ActionCosts
from zorse_megatron.simulate.layer_gathers import EVERYTHING, GatherPart
from zorse_megatron.simulate.perturb import Pace
from zorse_megatron.simulate.set_tasks import SetTasks
from zorse_megatron.simulate.streams import Streams
from zorse_megatron.simulate.task_graph import Role


class PassTasks:
    """Those of one rank."""

    def __init__(self, streams: Streams, costs: ActionCosts, sets: SetTasks, pace: Pace) -> None:
        """`pace`: how much longer each takes than the costs say."""
        self.streams = streams
        self.rank, self.track = streams.rank, streams.track
        self.costs = costs
        self.sets = sets
        self.pace = pace
        self.set = costs.sizes.set_of(self.rank)
        self.times_s: dict[tuple[int, Kind, GatherPart], Sequence[float]] = {}
        """(chunk, kind, part of it) -> what its phases take, without a perturbation."""
        actions = self.track.actions
        self.split = {each.chunk for each in actions if each.kind is Kind.WEIGHT_GRADIENT}
        """Chunks whose weight gradients are computed apart."""

    def add(
        self, position: int, parts: Sequence[tuple[GatherPart, tuple[int, ...]]]
    ) -> Sequence[int]:
        """Add an action in parts, each of which also waits for tasks; returns its tasks."""
        action, owner = self.track.actions[position], (self.rank, position)
        factor = self.pace.draw()
        tasks = []
        for number, (part, after) in enumerate(parts):
            phases_s, main = self._phases_s(action, part), self.streams.main
            if factor != 1.0:
                phases_s = [factor * each for each in phases_s]
            if len(self.set) > 1:
                inside_s = part.layers * self._inside_s(action)
                task = self.sets.join(
                    self.set, action, owner, phases_s, inside_s, main, *after, part=number
                )
            else:
                task = self.streams.graph.add(owner, Role.COMPUTE, sum(phases_s), main, *after)
            tasks.append(self.streams.on_main(task))
        if len(tasks) > 1:
            self.track.starts[position] = tasks[0]
        return tasks

    def _phases_s(self, action: Action, part: GatherPart) -> Sequence[float]:
        """See `ActionCosts.seconds` and `forward_part_s`."""
        chunk, kind = action.chunk, action.kind
        assert chunk is not None
        found = self.times_s.get((chunk, kind, part))
        if found is None:
            if part is EVERYTHING:
                found = self.costs.seconds(self.rank, chunk, kind, splits=chunk in self.split)
            else:
                found = self.costs.forward_part_s(self.rank, chunk, part)
            self.times_s[chunk, kind, part] = found
        return found

    def _inside_s(self, action: Action) -> float:
        """What the set communicates in a computation; gathers for weight gradients overlap."""
        if action.kind is Kind.WEIGHT_GRADIENT:
            return 0.0
        assert action.chunk is not None
        gathers = not self.costs.sizes.has_own_input(action)
        inside = self.costs.set_collectives(self.set, action.chunk, gathers=gathers)
        return float(inside.forward_s if action.kind is Kind.FORWARD else inside.backward_s)
