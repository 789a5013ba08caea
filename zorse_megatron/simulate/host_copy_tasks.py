"""The copies between a rank and its host; the rules are those of `translate`."""

from itertools import pairwise

from zorse_megatron.schedules.actions import COMPUTE, Action, Kind
from zorse_megatron.schedules.activation_offloads import Pass, leaving_activations
from zorse_megatron.simulate.action_costs import ActionCosts
from zorse_megatron.simulate.residency import Residency
from zorse_megatron.simulate.streams import Streams
from zorse_megatron.simulate.task_graph import NOTHING, Role, live


class HostCopyTasks:
    """Copies of parameters, of gradients and of activations, on two streams."""

    def __init__(
        self,
        streams: Streams,
        costs: ActionCosts,
        residency: Residency,
        pending: dict[int | None, int],
    ) -> None:
        """`pending`: chunk -> a FETCH that the main stream has not waited for; they are added."""
        self.streams = streams
        self.graph = streams.graph
        self.track = streams.track
        self.rank = streams.rank
        self.costs = costs
        self.sizes = costs.sizes
        self.residency = residency
        self.pending = pending
        self.last: dict[tuple[Kind, int | None], int] = {}
        """The last GATHER, OFFLOAD and FETCH of each chunk, for the copies after it."""
        self.last_out = self.shard_out = NOTHING
        """The last copies of activations and of a shard of gradients to the host."""
        self.last_sent = 0
        """Position of the forward whose activations left last."""
        self.away: dict[Pass, int] = {}
        """Forward -> the copy of its activations to the host."""
        computations = [(at, a) for at, a in enumerate(self.track.actions) if a.kind in COMPUTE]
        self.following = {earlier[0]: later for earlier, later in pairwise(computations)}
        """Position of a computation -> that of the next one, and it."""
        self.coming: dict[Pass, int] = {}
        """Backward -> the copy of its activations from the host."""
        offloads = self.sizes.settings[self.rank].offload.activations
        passes = [action for _, action in computations]
        self.offloaded = leaving_activations(passes) if offloads else frozenset()
        """The forwards whose activations wait in the host."""

    def move(self, position: int, action: Action) -> int:
        """OFFLOAD or FETCH: parameters leave or come back."""
        out = action.kind is Kind.OFFLOAD
        first = (Kind.GATHER, Kind.FETCH) if out else (Kind.OFFLOAD,)
        move = self.residency.moves[position]
        streams = self.streams
        stream = streams.to_host if out else streams.from_host
        if out and not move.copied_bytes:  # only the memory goes: it does not queue behind copies
            stream = NOTHING
        own = live([stream, *(self.last.get((kind, action.chunk)) for kind in first)])
        self.track.own[position] = own
        seconds_s = self.costs.copy_s(self.rank, move.copied_bytes)
        task = self.graph.add((self.rank, position), Role.COPY, seconds_s, streams.main, *own)
        self.last[action.kind, action.chunk] = task
        if not out:
            streams.from_host = self.pending[action.chunk] = task
        elif move.copied_bytes:
            streams.to_host = streams.on_main(task)
        return task

    def send_gradients(self, position: int, action: Action, *, after: int) -> int:
        """OFFLOADG: a shard of gradients leaves when it is reduced. `after`: the last REDUCE."""
        assert action.chunk is not None
        streams = self.streams
        streams.run(position, Role.COPY, 0.0, *live([after, self.shard_out]))
        seconds_s = self.costs.copy_s(self.rank, self.residency.shard_of_gradients(action.chunk))
        owner = self.rank, position
        streams.to_host = self.graph.add(owner, Role.COPY, seconds_s, streams.main, streams.to_host)
        self.shard_out = streams.to_host
        return self.shard_out

    def read_for_norm(self, position: int, own: tuple[int, ...]) -> tuple[int, ...]:
        """Gradients that come from the host for their norm; what NORM waits for then."""
        num_bytes, _ = self.residency.for_norm
        if not num_bytes:
            return own
        seconds_s = self.costs.copy_s(self.rank, num_bytes)
        self.track.copies[position] = self.streams.run(position, Role.COPY, seconds_s, *own)
        return ()

    def send_activations(self, position: int, action: Action) -> None:
        """What a forward keeps may leave, when what the one before it kept has left."""
        assert action.chunk is not None
        streams = self.streams
        if self.last_out != NOTHING:
            left = streams.run(position, Role.COPY, 0.0, self.last_out)
            self.track.left[self.last_sent], self.last_out = left, NOTHING
        if (action.chunk, action.micro_batch) not in self.offloaded:
            return
        self.last_sent = position
        kept_bytes = self.sizes.micro_batch_bytes(self.rank, action.chunk).kept
        seconds_s = self.costs.copy_s(self.rank, kept_bytes)
        owner = self.rank, position
        streams.to_host = self.last_out = self.graph.add(
            owner, Role.COPY, seconds_s, streams.main, streams.to_host
        )
        self.track.copies[position] = streams.to_host
        self.away[action.chunk, action.micro_batch] = streams.to_host

    def bring_back(self, position: int) -> None:
        """As a computation begins: what the next one needs comes back, if that is a backward."""
        at, action = self.following.get(position, (position, None))
        if action is None or action.kind is not Kind.BACKWARD:
            return
        key = action.chunk, action.micro_batch
        if key not in self.away:
            return
        assert action.chunk is not None
        streams, out = self.streams, self.away[key]
        kept_bytes = self.sizes.micro_batch_bytes(self.rank, action.chunk).kept
        seconds_s = self.costs.copy_s(self.rank, kept_bytes)
        streams.from_host = self.coming[key] = self.graph.add(
            (self.rank, at), Role.COPY, seconds_s, streams.main, streams.from_host, out
        )
        self.track.copies[at] = streams.from_host
        self.track.brings[position] = at
