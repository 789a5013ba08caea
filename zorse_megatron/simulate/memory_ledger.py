"""Every change of the bytes on a rank's GPU, action by action, and their sum over time."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from operator import itemgetter

from zorse_megatron.schedule.actions import RECEIVES, SENDS, Action, Kind
from zorse_megatron.simulate.rank_bytes import MicroBatchBytes
from zorse_megatron.simulate.residency import StepWorkingSet
from zorse_megatron.simulate.tasks import Timeline


class Category(IntEnum):
    """What bytes are used for."""

    PARAMETERS = 0
    GRADIENTS = 1
    OPTIMIZER_STATE = 2
    ACTIVATIONS = 3
    BUFFERS = 4
    LOGITS = 5
    FIXED = 6

    @property
    def label(self) -> str:
        """For people."""
        return self.name.lower().replace("_", " ")


_STEP_WORKING_SET = {
    Category.PARAMETERS: "parameter_bytes",
    Category.GRADIENTS: "gradient_bytes",
    Category.OPTIMIZER_STATE: "state_bytes",
}

Change = tuple[float, Category, int]
"""(time in seconds, category, bytes more or less)."""

Part = tuple[Kind, int, int | None]
"""Kind of transfer, chunk, micro-batch."""


def _part(action: Action) -> Part:
    assert action.chunk is not None
    return action.kind, action.chunk, action.micro_batch


def changes_of(timeline: Timeline, rank: int) -> tuple[list[int], list[Change]]:
    """Bytes of each category at the start, and all changes in the order of time.

    Changes of one moment are in the order of the list, and what is freed when an action ends
    is freed before the next one takes anything.
    """
    ledger = _Ledger(timeline, rank)
    ledger.write()
    ledger.changes.sort(key=itemgetter(0))  # stable
    return ledger.start, ledger.changes


class _Ledger:
    def __init__(self, timeline: Timeline, rank: int) -> None:
        self.timeline = timeline
        self.start_s, self.end_s = timeline.times.start_s, timeline.times.end_s
        self.sizes = sizes = timeline.sizes
        self.rank = rank
        self.track = timeline.program.tracks[rank]
        self.residency = self.track.residency
        self.changes: list[Change] = []
        self.received: dict[Part, list[int]] = {}
        """Bytes of each piece that a computation consumes."""
        self.sends_left: Counter[Part] = Counter()
        self.leaving: dict[int, list[tuple[float, int]]] = {}
        """Position -> when each message has left that must have by then, and its bytes."""
        self.views_leave_s: dict[Part, float] = {}
        """When all parts of a tensor that are sent without a copy will have left."""
        self.resharded = self.residency.resharded | {
            chunk for chunk in sizes.chunks(rank) if sizes.mixed_tp[chunk] is not None
        }
        """Chunks whose unsharded gradients go when they have been summed."""
        self.with_gradients: set[int] = set()
        """Those of them that have unsharded gradients now."""
        self.summed_s = 0.0
        """When the rank's last sum of gradients has arrived."""
        self.shard_leaves: tuple[float, int] = 0.0, 0
        """When a shard of gradients that is on its way to the host has left, and its bytes."""
        self.let_go: list[tuple[Category, int]] = []
        """Changes of memory once that sum has been waited for."""
        kinds = [action.kind for action in self.track.actions]
        self.steps = [at for at, kind in enumerate(kinds) if kind is Kind.STEP]
        self.starts_behind_norm = self.steps[:1] == [0]
        """Whether it begins with what has been summed."""
        for action in self.track.actions:
            if action.kind in SENDS:
                self.sends_left[_part(action)] += 1
        self.start = self._first_bytes()

    def _first_bytes(self) -> list[int]:
        """By category, before the list begins."""
        chunks = self.sizes.chunks(self.rank)
        gradients = sum(self._gradient_bytes(each) for each in chunks if each not in self.resharded)
        if self.starts_behind_norm:
            gradients += self._stepped_bytes()
        found = [0] * len(Category)
        found[Category.PARAMETERS] = self.residency.start_parameter_bytes
        found[Category.GRADIENTS] = gradients
        found[Category.OPTIMIZER_STATE] = self.residency.start_state_bytes
        found[Category.FIXED] = self.timeline.fixed_bytes[self.rank]
        return found

    def write(self) -> None:
        """Go through the list once."""
        opened_at: dict[int, list[int]] = {}
        for receive, post_position in self.track.posted_at.items():
            opened_at.setdefault(post_position, []).append(receive)
        for position, action in enumerate(self.track.actions):
            for receive in opened_at.get(position, ()):
                self._open(position, self.track.actions[receive])
            if position in self.leaving:
                self._close(position)
            kind = action.kind
            if position in self.track.brings:  # the next one's activations, with its beginning
                saved = self._of(self.track.actions[self.track.brings[position]]).saved
                self._note(self._reached_s(position), Category.ACTIVATIONS, saved)
            if kind in RECEIVES:
                continue  # it was opened
            if kind in SENDS:
                self._send(position, action)
            elif kind is Kind.FORWARD:
                self._forward(position, action)
            elif kind is Kind.BACKWARD:
                self._backward(position, action)
            elif kind is Kind.WEIGHT_GRADIENT:
                _, end_s = self._run(position)
                self._note(end_s, Category.ACTIVATIONS, -self._of(action).delayed)
            else:
                self._on_state(position, action)
        if len(self.track.actions) in self.leaving:
            self._close(len(self.track.actions))

    def _of(self, action: Action) -> MicroBatchBytes:
        """What there is of a computation's micro-batch."""
        assert action.chunk is not None
        return self._bytes(action.chunk, action.micro_batch)

    def _reached_s(self, position: int) -> float:
        """As `Timeline.reached_s`."""
        task = self.track.before[position]
        return self.end_s[task] if task >= 0 else 0.0

    def _note(self, time_s: float, category: Category, num_bytes: int) -> None:
        if num_bytes:
            self.changes.append((time_s, category, num_bytes))

    def _open(self, position: int, action: Action) -> None:
        """Take the buffer of a receive, at the turn of the action at `position`."""
        num_bytes = self.sizes.crossing_bytes(action)
        key = _part(action)
        self.received.setdefault(key, []).append(num_bytes)
        self._note(self._reached_s(position), Category.BUFFERS, num_bytes)

    def _send(self, position: int, action: Action) -> None:
        num_bytes, whole_bytes = self.sizes.crossing_bytes(action), self._of(action).held
        key = _part(action)
        self.sends_left[key] -= 1
        left_s = self.end_s[self.track.tasks[position]]
        if num_bytes != whole_bytes and self._is_view(action):
            # It keeps the whole tensor until all of it has left.
            left_s = self.views_leave_s[key] = max(left_s, self.views_leave_s.get(key, 0.0))
            if self.sends_left[key]:
                return
            num_bytes = whole_bytes
        elif num_bytes != whole_bytes:
            self._note(self._reached_s(position), Category.BUFFERS, num_bytes)
            if not self.sends_left[key]:
                self._note(self._reached_s(position), Category.BUFFERS, -whole_bytes)
        wait_position = self.track.waited_at.get(position, position + 1)
        self.leaving.setdefault(wait_position, []).append((left_s, num_bytes))

    def _close(self, position: int) -> None:
        """Let go of the messages that must have left before the action at `position`."""
        last = min(position, len(self.track.actions) - 1)
        reached_s = self._reached_s(last)
        for left_s, num_bytes in self.leaving.pop(position):
            self._note(max(reached_s, left_s), Category.BUFFERS, -num_bytes)

    def _bytes(self, chunk: int, micro_batch: int | None) -> MicroBatchBytes:
        assert micro_batch is not None
        return self.sizes.micro_batch_bytes(self.rank, chunk, micro_batch)

    def _is_view(self, action: Action) -> bool:
        """Whether it is consecutive positions of all samples, which needs no copy."""
        assert action.samples is not None and action.chunk is not None
        assert action.micro_batch is not None
        own = self.sizes.size_of(self.rank, action.micro_batch)
        all_samples = action.samples[1] - action.samples[0] == own
        same_type = self.sizes.boundary_bytes(1, action.chunk) == min(
            self.sizes.boundary_bytes(1, each) for each in (action.chunk, action.other_chunk)
        )
        return action.positions is not None and all_samples and same_type

    def _forward(self, position: int, action: Action) -> None:
        assert action.chunk is not None
        chunk, of_chunk = action.chunk, self._bytes(action.chunk, action.micro_batch)
        start_s, _ = self._run(position)
        key = Kind.RECV_F, chunk, action.micro_batch
        self._note(start_s, Category.BUFFERS, -self._take(key, start_s))
        self._note(start_s, Category.ACTIVATIONS, of_chunk.saved)
        self._note(start_s, Category.LOGITS, of_chunk.head)
        if position in self.track.copies:
            gone_s = self.end_s[self.track.left[position]]
            self._note(gone_s, Category.ACTIVATIONS, -of_chunk.saved)
        if (Kind.SEND_F, chunk, action.micro_batch) in self.sends_left:
            self._note(start_s, Category.BUFFERS, of_chunk.held)
        elif self.sizes.is_local(chunk):
            self._hand_over(start_s, (Kind.RECV_F, chunk + 1, action.micro_batch))

    def _backward(self, position: int, action: Action) -> None:
        assert action.chunk is not None
        chunk, of_chunk = action.chunk, self._bytes(action.chunk, action.micro_batch)
        start_s, end_s = self._run(position)
        received = self._take((Kind.RECV_B, chunk, action.micro_batch), start_s)
        if chunk in self.resharded and chunk not in self.with_gradients:
            self.with_gradients.add(chunk)
            self._note(start_s, Category.GRADIENTS, self._gradient_bytes(chunk))
        if (Kind.SEND_B, chunk, action.micro_batch) in self.sends_left:
            self._note(start_s, Category.BUFFERS, of_chunk.held)
        elif chunk > 0 and self.sizes.is_local(chunk - 1):
            self._hand_over(start_s, (Kind.RECV_B, chunk - 1, action.micro_batch))
        # Layers are computed again after the head's backward, when its part is freed; not before
        # there are gradients.
        head_ends_s = start_s if of_chunk.working else end_s
        self._note(head_ends_s, Category.LOGITS, -of_chunk.head)
        self._for_a_while(position, Category.ACTIVATIONS, of_chunk.working)
        # Layer by layer, what is kept for weight gradients takes the place of what forwards kept.
        more = max(0, of_chunk.delayed - of_chunk.saved)
        self._note(start_s, Category.ACTIVATIONS, more)
        left = of_chunk.delayed - (of_chunk.saved + more)
        self._note(end_s, Category.ACTIVATIONS, left)
        self._note(end_s, Category.BUFFERS, -received)

    def _take(self, key: Part, start_s: float) -> int:
        """What a computation has received, in one tensor: pieces are there until it is made."""
        pieces = self.received.pop(key, [])
        if not pieces:
            return 0
        whole = self._bytes(*key[1:]).held
        if pieces != [whole]:
            self._note(start_s, Category.BUFFERS, whole)
            self._note(start_s, Category.BUFFERS, -sum(pieces))
        return whole

    def _hand_over(self, time_s: float, key: Part) -> None:
        """Keep what a computation makes for the neighbouring chunk, as if it were received."""
        num_bytes = self._bytes(*key[1:]).held
        self.received[key] = [num_bytes]
        self._note(time_s, Category.BUFFERS, num_bytes)

    def _on_state(self, position: int, action: Action) -> None:
        _, end_s = self._run(position)
        chunk, sizes = action.chunk, self.sizes
        if action.kind in (Kind.TIE, Kind.SCALE):
            self._wait_for_sums(position)
        if action.kind in (Kind.SCALE, Kind.OFFLOAD_GRAD):
            self._let_shard_go(position)
        if action.kind is Kind.SCALE:
            self._pass_for_norm(position)
        if action.kind is Kind.UNSHARD:
            assert chunk is not None
            exchanged = sizes.exchange_bytes(action.kind, self.rank, chunk)
            self._for_a_while(position, Category.BUFFERS, exchanged)
        if action.kind is Kind.STEP:
            self._pass_for_update(position)
            if position == self.steps[0] and not self.starts_behind_norm:
                widened = self.residency.widened_bytes
                self._note(self._reached_s(position), Category.GRADIENTS, widened)
            if position == self.steps[-1]:
                self._note(end_s, Category.GRADIENTS, -self._stepped_bytes())
        elif action.kind is Kind.NORM:
            widened = self.residency.widened_bytes
            self._note(self._reached_s(position), Category.GRADIENTS, widened)
        elif action.kind is Kind.TIE:
            swapped = sum(size for _, size in sizes.tied_swaps.get(self.rank, ()))
            ready_s = self.timeline.ready_s(self.track, position)
            self._note(ready_s, Category.BUFFERS, swapped)
            self._note(end_s, Category.BUFFERS, -swapped)
        elif action.kind is Kind.REDUCE_GRAD:
            self._reduce(position, action)
        elif action.kind is Kind.OFFLOAD_GRAD:
            assert chunk is not None
            self._wait_for_sums(position)
            self.shard_leaves = end_s, self.residency.shard_of_gradients(chunk)
        elif position in self.residency.moves:
            self._move(position, end_s)

    def _reduce(self, position: int, action: Action) -> None:
        """Sum gradients; what is summed goes when the rank waits for the sum (`_wait_for_sums`)."""
        assert action.chunk is not None
        start_s, end_s = self._run(position)
        chunk, sizes = action.chunk, self.sizes
        exchanged = sizes.exchange_bytes(action.kind, self.rank, chunk)
        if exchanged or chunk in self.resharded:
            self._wait_for_sums(position)
        self.summed_s, before_s = end_s, self.summed_s
        if is_mixed_tp := sizes.mixed_tp[chunk] is not None:
            self._for_a_while(position, Category.BUFFERS, exchanged)
        else:
            self._note(start_s, Category.BUFFERS, exchanged)
            self.let_go.append((Category.BUFFERS, -exchanged))
        if chunk not in self.resharded:
            return
        shard = self.residency.shard_of_gradients(chunk)
        unsharded = self._gradient_bytes(chunk)
        if chunk not in self.with_gradients:
            # No micro-batches: it has zeros to add as soon as the sum before has arrived.
            asked_s = max(self._reached_s(position), before_s)
            self._note(asked_s, Category.GRADIENTS, unsharded)
        self.with_gradients.discard(chunk)
        if is_mixed_tp:  # sums arrive beside what they are made of
            self._note(start_s, Category.GRADIENTS, shard)
            self._note(end_s, Category.GRADIENTS, -unsharded)
        else:
            self.let_go.append((Category.GRADIENTS, shard - unsharded))

    def _let_shard_go(self, position: int) -> None:
        """The main stream waits until the shard on its way to the host has left."""
        (left_s, num_bytes), self.shard_leaves = self.shard_leaves, (0.0, 0)
        left_s = max(left_s, self._reached_s(position))
        self._note(left_s, Category.GRADIENTS, -num_bytes)

    def _pass_for_norm(self, position: int) -> None:
        """Gradients in the host are on the GPU for their norm, before they are for the update."""
        if position in self.track.copies:
            task, (_, num_bytes) = self.track.copies[position], self.residency.for_norm
            self._note(self.start_s[task], Category.GRADIENTS, num_bytes)
            self._note(self.end_s[task], Category.GRADIENTS, -num_bytes)

    def _pass_for_update(self, position: int) -> None:
        """What comes from the host, one part after the other."""
        start_s, end_s = self._run(position)
        now = dict.fromkeys(_STEP_WORKING_SET, 0)
        for held in (*self.residency.step_working_sets[position], StepWorkingSet()):
            next_ = {category: getattr(held, name) for category, name in _STEP_WORKING_SET.items()}
            time_s = start_s if held.num_bytes else end_s
            changes = {category: next_[category] - now[category] for category in _STEP_WORKING_SET}
            for category in sorted(
                _STEP_WORKING_SET, key=lambda each: changes[each]
            ):  # first what goes
                self._note(time_s, category, changes[category])
            now = next_

    def _wait_for_sums(self, position: int) -> None:
        """The main stream waits at an action: all that was to be summed is there, the rest goes."""
        waited_s = max(self._reached_s(position), self.summed_s)
        for category, num_bytes in self.let_go:
            self._note(waited_s, category, num_bytes)
        self.let_go.clear()

    def _move(self, position: int, end_s: float) -> None:
        """Bytes are taken when a copy or a gather is issued, and freed when it is done."""
        move = self.residency.moves[position]
        time_s = self._reached_s(position) if move.num_bytes > 0 else end_s
        self._note(time_s, Category.PARAMETERS, move.num_bytes)

    def _for_a_while(self, position: int, category: Category, num_bytes: int) -> None:
        if num_bytes:
            start_s, end_s = self._run(position)
            self._note(start_s, category, num_bytes)
            self._note(end_s, category, -num_bytes)

    def _run(self, position: int) -> tuple[float, float]:
        first, last = self.track.first_task(position), self.track.tasks[position]
        return self.start_s[first], self.end_s[last]

    def _gradient_bytes(self, chunk: int) -> int:
        return self.sizes.memory_of(chunk).gradient_bytes(self.sizes.held(self.rank, chunk))

    def _stepped_bytes(self) -> int:
        """Gradients that are there for the update alone: shards, and fp32 copies."""
        here = self.resharded - self.residency.gradients_in_host
        return self.residency.widened_bytes + sum(map(self.residency.shard_of_gradients, here))


# Bytes on each rank's GPU over time, by category.
#
# When bytes come and go is what `runtime.executor`, `runtime.mailbox` and
# `adapter.model.chunk_runner` do:
#
# - Unsharded parameters and gradients are there all the time (Megatron's buffers), and the rank's
#   shard of the optimizer state. For a chunk that the list RESHARDs, unsharded parameters are there
#   from UNSHARD to RESHARD, and unsharded gradients from the first backward until the rank waits
#   for their sum, before its next REDUCE_GRAD of such a chunk, TIE or SCALE; then the shard until
#   STEP is done, or, after an OFFLOAD_GRAD, until the rank waits for it to have left, before its
#   next OFFLOAD_GRAD or SCALE.
# - A forward takes what its layers keep, and on the last chunk the logits; both are freed when
#   the backward ends. With recomputation, a backward also takes what one layer makes again.
# - A receive takes its buffer when it is started. An activation's buffer becomes the kept input of
#   the chunk's first layer; a gradient's is freed when the backward ends.
# - A forward's output and a backward's input gradient are kept until the last send of them has been
#   started; on the way to a chunk of the same group they count as if they were received. What is
#   sent in pieces is copied. A message is freed when the rank starts its first send after the
#   message has arrived, as `Mailbox.start_send` does.
# - Activations that wait in the host are gone from the end of the copy out until the rank begins
#   the computation before their backward, with which the copy back starts. What OFFLOAD, FETCH,
#   UNSHARD and RESHARD move, and what passes through during STEP: see `residency`.


@dataclass(frozen=True, kw_only=True)
class PeakMemory:
    """One rank's highest memory, in bytes."""

    total_bytes: int
    """Of all categories together."""
    at_peak_bytes: Mapping[Category, int]
    """What the total consisted of then."""
    by_category_bytes: Mapping[Category, int]
    """Each category's own peak, which may be at another time."""


@dataclass(frozen=True, kw_only=True)
class MemoryStep:
    """Bytes on one GPU from `time_s` until the next step."""

    time_s: float
    by_category_bytes: tuple[int, ...]
    """By `Category`."""

    @property
    def total_bytes(self) -> int:
        """All categories."""
        return sum(self.by_category_bytes)


def memory_over_time(timeline: Timeline, rank: int) -> tuple[MemoryStep, ...]:
    """Bytes before anything runs, then after each change (at one moment: after the last)."""
    current, changes = changes_of(timeline, rank)
    steps = [MemoryStep(time_s=0.0, by_category_bytes=tuple(current))]
    for time_s, category, num_bytes in changes:
        current[category] += num_bytes
        step = MemoryStep(time_s=time_s, by_category_bytes=tuple(current))
        if len(steps) > 1 and steps[-1].time_s == time_s:
            steps[-1] = step
        else:
            steps.append(step)
    return tuple(steps)


def peak_memory(timeline: Timeline, rank: int) -> PeakMemory:
    """The rank's peaks. Changes at one moment count one after the other (see `changes_of`)."""
    current, changes = changes_of(timeline, rank)
    total = highest_total = sum(current)
    highest, at_peak = list(current), list(current)
    for _, category, num_bytes in changes:
        current[category] += num_bytes
        total += num_bytes
        highest[category] = max(highest[category], current[category])
        if total > highest_total:
            highest_total, at_peak = total, list(current)
    return PeakMemory(
        total_bytes=highest_total,
        at_peak_bytes=dict(zip(Category, at_peak, strict=True)),
        by_category_bytes=dict(zip(Category, highest, strict=True)),
    )
