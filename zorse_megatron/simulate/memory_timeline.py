"""Bytes on each rank's GPU over time, by category.

When bytes come and go is what `runtime.executor`, `runtime.mailbox` and
`adapter.model.chunk_runner` do:

- Unsharded parameters and gradients are there all the time (Megatron's buffers), and the rank's
  shard of the optimizer state. For a chunk that the list RELEASEs, unsharded parameters are there
  from GATHER to RELEASE, and unsharded gradients from the first backward until the rank waits for
  their sum, before its next REDUCE of such a chunk, TIE or SCALE; then the shard until STEP is
  done, or, after an OFFLOADG, until the rank waits for it to have left, before its next OFFLOADG or
  SCALE.
- A forward takes what its layers keep, and on the last chunk the logits; both are freed when
  the backward ends. With recomputation, a backward also takes what one layer makes again.
- A receive takes its buffer when it is started. An activation's buffer becomes the kept input of
  the chunk's first layer; a gradient's is freed when the backward ends.
- A forward's output and a backward's input gradient are kept until the last send of them has been
  started; on the way to a chunk of the same group they count as if they were received. What is sent
  in pieces is copied. A message is freed when the rank starts its first send after the message
  has arrived, as `Mailbox.start_send` does.
- Activations that wait in the host are gone from the end of the copy out until the rank begins the
  computation before their backward, with which the copy back starts. What OFFLOAD, FETCH, GATHER
  and RELEASE move, and what passes through during STEP: see `residency`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

from zorse_megatron.simulate.ledger import Category, changes_of
from zorse_megatron.simulate.timeline import Timeline


@dataclass(frozen=True, kw_only=True)
class Moment:
    """A number of bytes, and when and by which action it was first reached."""

    num_bytes: int
    time_s: float
    action: str | None
    """None: it was so from the start."""


@dataclass(frozen=True, kw_only=True)
class PeakMemory:
    """One rank's highest memory."""

    total: Moment
    at_peak_bytes: Mapping[Category, int]
    """What the total consisted of then."""
    by_category: Mapping[Category, Moment]
    """Each category's own peak, which may be at another time."""

    @property
    def total_bytes(self) -> int:
        """Peak of all categories together."""
        return self.total.num_bytes


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
    for time_s, category, num_bytes, _ in changes:
        current[category] += num_bytes
        step = MemoryStep(time_s=time_s, by_category_bytes=tuple(current))
        if len(steps) > 1 and steps[-1].time_s == time_s:
            steps[-1] = step
        else:
            steps.append(step)
    return tuple(steps)


def peak_bytes(timeline: Timeline, rank: int) -> int:
    """The rank's peak of all categories together: `PeakMemory.total_bytes`, sooner."""
    start, changes = changes_of(timeline, rank)
    return max(accumulate((num_bytes for _, _, num_bytes, _ in changes), initial=sum(start)))


def peak_memory(timeline: Timeline, rank: int) -> PeakMemory:
    """The rank's peaks. Changes at one moment count one after the other (see `changes_of`)."""
    current, changes = changes_of(timeline, rank)
    total = highest_total = sum(current)
    highest = list(current)
    last: list[tuple[float, int] | None] = [None] * len(current)
    last_total: tuple[float, int] | None = None
    at_peak = list(current)
    for time_s, category, num_bytes, position in changes:
        current[category] += num_bytes
        total += num_bytes
        if num_bytes < 0:
            continue
        if current[category] > highest[category]:
            highest[category] = current[category]
            last[category] = time_s, position
        if total > highest_total:
            highest_total = total
            last_total = time_s, position
            at_peak = list(current)
    actions = timeline.program.tracks[rank].actions

    def moment(num_bytes: int, found: tuple[float, int] | None) -> Moment:
        time_s, action = (0.0, None) if found is None else (found[0], str(actions[found[1]]))
        return Moment(num_bytes=num_bytes, time_s=time_s, action=action)

    return PeakMemory(
        total=moment(highest_total, last_total),
        at_peak_bytes=dict(zip(Category, at_peak, strict=True)),
        by_category={category: moment(highest[category], last[category]) for category in Category},
    )
