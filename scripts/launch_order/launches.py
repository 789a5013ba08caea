"""What a rank on a GPU launches for its list: on which stream, and what each launch waits for.

The rules are those of `runtime.executor`, `runtime.transport` and `adapter.model.chunk_runner`; a
test compares them with the calls of torch.distributed that a training run makes. A communicator
runs its kernels on a stream of its own. A receive is launched at its place in the list, on the side
stream, which waits for the main stream to come to where its buffer was opened. The host waits for
numbers of tokens in each layer whose experts ranks share, and for the loss of each micro-batch. If
loads of experts are told in order (`adapter.model.experts.LoadsInOrder`), it waits after each
forward for its own, and before each backward for what other ranks tell of earlier samples.
"""

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from zorse_megatron.plan.memory_settings import settings_in
from zorse_megatron.plan.plan import Plan, has_equal_tp_shards
from zorse_megatron.schedule.actions import ON_LAYERS, RECEIVES, SENDS, Action, ActionLists, Kind
from zorse_megatron.schedule.communicators import Communicator, communicators_of
from zorse_megatron.schedule.pipeline_schedules import RESIDENT, parameters_setting
from zorse_megatron.schedule.samples import rank_micro_batches
from zorse_megatron.schedule.transfer_windows import receives_posted_at, sends_waited_at

MAIN, SIDE, TO_HOST, FROM_HOST = "main", "side", "to host", "from host"
HOST = "host"
"""No stream: the host itself waits."""
# Of a computation on a tensor-parallel group: one in attention, one in the MLP.
_TP_SUMS = 2
Operation = tuple[Communicator, int]
"""A communicator, and how many of its operations come before."""


@dataclass(kw_only=True, eq=False, slots=True)
class Launch:
    """One kernel, copy, or wait for events."""

    rank: int
    stream: Hashable
    """A stream's name, or the communicator that it belongs to."""
    word: str
    after: tuple["Launch", ...] = ()
    """What it waits for beside the launch before it on its stream."""
    operation: Operation | None = None
    """Of a communicator's kernel: which one."""
    kind: str = ""
    """Of a communicator's kernel: send, receive, or what the collective is."""
    holds_host: bool = False
    """Whether the host launches nothing more until it is done."""


# What ranks that share experts alone send each other, by `adapter.model.expert_exchange`.

CHOICES, ROWS, WEIGHTS = "choices", "rows", "weights"
"""Which experts tokens go to, the tokens or what experts return of them, and experts' weights."""


@dataclass(frozen=True, kw_only=True)
class _Passage:
    """Tokens on their way to experts or back; of a micro-batch, or of half of it."""

    layer: int
    half: int
    sent: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class _Step:
    """A passage begins, or ends where it is waited for; before, ranks tell each other choices."""

    kind: Literal["tell", "begin", "end"]
    passage: _Passage
    holds_host: bool = False


def _forward_steps(layers: Sequence[int], with_experts: Sequence[int], halves: int) -> list[_Step]:
    """In the order of `adapter.model.overlapped_layer`, which one half alone has too."""
    found: list[_Step] = []
    returning: list[_Passage] = []
    for layer in layers:
        leaving = []
        for half in range(halves):
            found += [_Step(kind="end", passage=each) for each in returning if each.half == half]
            if with_experts[layer]:
                leaves = _Passage(layer=layer, half=half, sent=(ROWS, WEIGHTS))
                leaving.append(leaves)
                found += [_Step(kind="tell", passage=leaves), _Step(kind="begin", passage=leaves)]
        returning = []
        for leaves in leaving:
            returns = replace(leaves, sent=(ROWS,))
            returning.append(returns)
            # Products in torch take counts from the host.
            arrived = _Step(kind="end", passage=leaves, holds_host=True)
            found += [arrived, _Step(kind="begin", passage=returns)]
    return found + [_Step(kind="end", passage=each) for each in returning]


def _backwards(steps: Iterable[_Step]) -> Iterator[_Step]:
    """Gradients go the other way; choices have none."""
    for step in reversed(list(steps)):
        if step.kind != "tell":
            yield _Step(kind="end" if step.kind == "begin" else "begin", passage=step.passage)


def launches_of(plan: Plan, lists: ActionLists, *, in_order: bool = False) -> list[list[Launch]]:
    """For each rank what its list launches, in order. `in_order`: loads of experts are told."""
    communicators = communicators_of(plan, [lists])
    tied = [rank for rank, actions in enumerate(lists.ranks) if Action(kind=Kind.TIE) in actions]
    ranks = [
        _Launches(plan, rank, actions, communicators, tied, in_order)
        for rank, actions in enumerate(lists.ranks)
    ]
    found = [rank.all() for rank in ranks]
    told: dict[int | None, list[tuple[int, Launch]]] = defaultdict(list)
    for rank in ranks:
        for chunk, start, launch in rank.told:
            told[chunk].append((start, launch))
    for rank in ranks:
        for chunk, start, launch in rank.awaited:
            launch.after = tuple(each for earlier, each in told[chunk] if earlier < start)
    return found


@dataclass
class _Launches:
    plan: Plan
    rank: int
    actions: Sequence[Action]
    communicators: Sequence[Communicator]
    tied: Sequence[int]
    """Ranks with a copy of the tied embedding."""
    in_order: bool = False
    found: list[Launch] = field(default_factory=list)

    def __post_init__(self) -> None:
        mine = [c for c in self.communicators if self.rank in c.ranks]
        self.of_use = {(c.use, c.ranks if c.use == "link" else None): c for c in mine}
        self.group = self.plan.group_of_rank(self.rank)
        _, replica = self.plan.replica_of_rank(self.rank)
        self.replica = self.plan.groups[self.group].replicas[replica]
        self.is_resident = parameters_setting(self.plan) == RESIDENT
        self.is_packed = not has_equal_tp_shards(self.plan.groups[self.group])
        """Whether parts of tensors are exchanged, for which the main stream waits at once."""
        self.numbers: Counter[Communicator] = Counter()
        self.tail: Launch | None = None
        """The last launch on the main stream."""
        self.opened: dict[int, Launch | None] = {}
        """Position of a receive -> the main stream's last launch when its buffer was opened."""
        self.received: dict[tuple[bool, int | None, int | None], list[Launch]] = defaultdict(list)
        self.waited_at = sends_waited_at(self.actions)
        self.sent: dict[int, list[Launch]] = defaultdict(list)
        """Position -> sends for which the main stream waits there."""
        self.gathers: dict[int | None, list[Launch]] = {}
        self.copies: dict[int | None, Launch] = {}
        self.reducing: list[Launch] = []
        self.leaving: Launch | None = None
        """A shard of gradients on its way to the host."""
        self.samples = rank_micro_batches(self.plan, self.rank)
        self.told: list[tuple[int | None, int, Launch]] = []
        """Chunk, first sample, and the launch after which loads of a forward are known."""
        self.awaited: list[tuple[int | None, int, Launch]] = []
        """The same of backwards: the host's wait for what is told of earlier samples."""

    def all(self) -> list[Launch]:
        opens_at: dict[int, list[int]] = defaultdict(list)
        for receive, post_position in receives_posted_at(self.actions).items():
            opens_at[post_position].append(receive)
        for at, action in enumerate(self.actions):
            self.opened.update(dict.fromkeys(opens_at[at], self.tail))
            self._close(at)
            if action.kind in RECEIVES:
                self._receive(at, action)
            elif action.kind in SENDS:
                self._send(at, action)
            elif action.kind in ON_LAYERS:
                self._compute(at, action)
            else:
                self._on_state(action)
        self._close(len(self.actions))
        self._tell_loss()
        return self.found

    def _add(self, stream: Hashable, word: str, *after: Launch | None, **more: object) -> Launch:
        waits = tuple(launch for launch in after if launch is not None)
        launch = Launch(rank=self.rank, stream=stream, word=word, after=waits, **more)  # type: ignore[arg-type]
        self.found.append(launch)
        return launch

    def _on_main(self, word: str, *after: Launch | None, **more: object) -> Launch:
        self.tail = self._add(MAIN, word, *after, **more)
        return self.tail

    def _start(
        self,
        communicator: Communicator | None,
        kind: str,
        word: str,
        *after: Launch | None,
        among: Sequence[int] = (),
    ) -> Launch | None:
        """A kernel of a communicator; nothing where there is none, as the rank is alone.

        `among`: the ranks that take part, if not all of them do.
        """
        if communicator is None:
            return None
        part = replace(communicator, ranks=tuple(among)) if among else communicator
        operation = part, self.numbers[part]
        self.numbers[part] += 1
        return self._add(communicator, word, *after, operation=operation, kind=kind)

    def _receive(self, at: int, action: Action) -> None:
        word = str(action)
        link = self.of_use["link", (action.peer, self.rank)]  # type: ignore[index]
        opened = self._add(SIDE, f"{word} opened", self.opened[at])
        received = self._start(link, "receive", word, opened)
        assert received is not None
        forward = action.kind is Kind.RECV_F
        self.received[forward, action.chunk, action.micro_batch].append(received)

    def _send(self, at: int, action: Action) -> None:
        link = self.of_use["link", (self.rank, action.peer)]  # type: ignore[index]
        sent = self._start(link, "send", str(action), self.tail)
        assert sent is not None
        self.sent[self.waited_at[at]].append(sent)

    def _compute(self, at: int, action: Action) -> None:
        forward = action.kind is Kind.FORWARD
        samples = self.samples[action.micro_batch or 0]
        is_told = self.in_order and samples.size > 0
        if is_told and action.kind is Kind.BACKWARD:
            wait = self._add(HOST, f"{action} waits for loads")
            self.awaited.append((action.chunk, samples.start, wait))
        inputs = self.received.pop((forward, action.chunk, action.micro_batch), [])
        self._on_main(str(action), *inputs, *self.gathers.pop(action.chunk, []))
        for part in range(_TP_SUMS):
            self._sum_over_tp_group(f"{action}, part {part}")
        if self.replica.expert_parallel is not None:
            self._exchange_tokens(action)
        if is_told and forward:
            known = self._on_main(f"loads of {action}", holds_host=True)
            self.told.append((action.chunk, samples.start, known))
        if forward and action.chunk == len(self.plan.chunks) - 1:
            self._on_main(f"loss of {action}", holds_host=True)

    def _sum_over_tp_group(self, word: str) -> None:
        """A sum that the main stream waits for; nothing where the rank has no such group."""
        if self.replica.tp_degree > 1:
            group = self.of_use["tp_group", None]
            self._on_main(f"{word} waits", self._start(group, "sum", word, self.tail))

    def _exchange_tokens(self, action: Action) -> None:
        between = self.of_use["tp_group", None]
        under_way: dict[_Passage, list[Launch | None]] = {}
        for number, step in enumerate(self._steps(action)):
            passage = step.passage
            word = f"{action}, {number}: layer {passage.layer}, half {passage.half}"
            if step.kind == "begin":
                kinds = [f"{word}, {sent}" for sent in passage.sent]
                under_way[passage] = [self._start(between, k, k, self.tail) for k in kinds]
            elif step.kind == "end":
                arrived = under_way.pop(passage)
                self._on_main(f"{word} waits", *arrived, holds_host=step.holds_host)
            else:
                kind = f"{word}, {CHOICES}"
                told = self._start(between, kind, kind, self.tail)
                self._on_main(f"{word} waits", told, holds_host=True)

    def _steps(self, action: Action) -> Iterator[_Step]:
        """Those of a forward; of a backward, which computes some layers again."""
        assert self.replica.expert_parallel is not None and action.chunk is not None
        halves = self.replica.expert_parallel.parts
        with_experts = self.plan.model.layers_with_experts
        layers = range(*self.plan.chunks[action.chunk].layers)
        if action.kind is Kind.FORWARD:
            yield from _forward_steps(layers, with_experts, halves)
        elif action.kind is Kind.BACKWARD:
            again = layers[: self._num_recomputed(len(layers))]
            rest = _forward_steps(layers[len(again) :], with_experts, halves)
            yield from _backwards(rest)
            for layer in reversed(again):
                steps = _forward_steps([layer], with_experts, halves)
                yield from (*steps, *_backwards(steps))

    def _num_recomputed(self, layers: int) -> int:
        recompute = settings_in(self.plan.groups[self.group], self.replica).recompute
        if recompute is None or recompute.mode != "full":
            return 0
        return min(layers, recompute.num_layers or layers)

    def _reduce(self, chunk: int | None) -> list[Launch]:
        word, group = f"{chunk}REDUCE_GRAD", self.of_use.get(("group", None))
        self._sum_over_tp_group(f"{word}, of what is held whole")
        if (across := self.of_use.get(("across", None))) is not None:
            inside = self.of_use.get(("region", None))
            foreign = self._start(inside, word, f"{word} for others", self.tail)
            sent = self._start(across, word, f"{word} across", foreign or self.tail)
            reduced = [sent, self._start(inside, word, word, self.tail)]
        else:
            reduced = [self._start(group, word, word, self.tail)]
        started = [each for each in reduced if each is not None]
        if self.is_packed:
            self._on_main(f"{word} waits", *started)
        return started

    def _on_state(self, action: Action) -> None:
        {
            Kind.REDUCE_GRAD: self._reduction,
            Kind.UNSHARD: self._gather,
            Kind.RESHARD: self._release,
            Kind.FETCH: self._fetch,
            Kind.OFFLOAD: self._offload,
            Kind.OFFLOAD_GRAD: self._offload_gradients,
            Kind.TIE: self._swap,
            Kind.SCALE: self._sum,
            Kind.NORM: self._decide,
            Kind.STEP: self._step,
        }[action.kind](action)

    def _reduction(self, action: Action) -> None:
        group = self.plan.groups[self.group]
        if not self.is_resident or group.grad_reduce_dtype is not None or group.hierarchical:
            self._finish_reductions(action)
        self.reducing += self._reduce(action.chunk)

    def _finish_reductions(self, action: Action) -> None:
        reducing, self.reducing = self.reducing, []
        if reducing:
            self._on_main(f"{action} waits", *reducing)

    def _gather(self, action: Action) -> None:
        word = str(action)
        if action.chunk in self.copies:
            self._on_main(f"{word} waits", self.copies.pop(action.chunk))
        if (across := self.of_use.get(("across", None))) is not None:
            inside = self.of_use.get(("region", None))
            arrived = self._start(across, word, f"{word} across", self.tail)
            own = self._start(inside, word, word, self.tail)
            spread = self._start(inside, word, f"{word} of others", arrived)
            gathered = [arrived, own, spread]
        else:
            gathered = [self._start(self.of_use.get(("group", None)), word, word, self.tail)]
        started = [each for each in gathered if each is not None]
        if self.is_packed:
            self._on_main(f"{word} waits", *started)
        elif started:
            self.gathers[action.chunk] = started

    def _release(self, action: Action) -> None:
        if action.chunk in self.gathers:
            self._on_main(f"{action} waits", *self.gathers.pop(action.chunk))

    def _fetch(self, action: Action) -> None:
        self.copies[action.chunk] = self._add(FROM_HOST, str(action), self.tail)

    def _offload(self, action: Action) -> None:
        left = self._add(TO_HOST, str(action), self.tail, self.copies.pop(action.chunk, None))
        self._on_main(f"after {action}", left)

    def _offload_gradients(self, action: Action) -> None:
        self._let_gradients_go(action)
        self._finish_reductions(action)
        self.leaving = self._add(TO_HOST, str(action), self.tail)

    def _let_gradients_go(self, action: Action) -> None:
        if self.leaving is not None:
            self._on_main(f"{action} waits for the shard before", self.leaving)
        self.leaving = None

    def _swap(self, action: Action) -> None:
        """The tied embedding's gradient: taken as if each of its ranks waited for all others."""
        self._finish_reductions(action)
        if len(self.tied) > 1:
            world, word = self.of_use["world", None], str(action)
            swapped = self._start(world, word, word, self.tail, among=self.tied)
            self._on_main(f"after {action}", swapped)

    def _tell_loss(self) -> None:
        """To the job's last rank, if it does not know it; the host reads it there."""
        knows = self.plan.groups[self.plan.chunks[-1].group].ranks
        source, target = min(knows), self.plan.world_size - 1
        if target in knows:
            return
        world, ends = self.of_use["world", None], (source, target)
        if self.rank == source:
            self._start(world, "send", "loss", self.tail, among=ends)
        elif self.rank == target:
            received = self._start(world, "receive", "loss", self.tail, among=ends)
            self._on_main("after loss", received, holds_host=True)

    def _sum(self, action: Action) -> None:
        """Numbers of all ranks."""
        self._finish_reductions(action)
        self._let_gradients_go(action)
        summed = self._start(self.of_use.get(("world", None)), str(action), str(action), self.tail)
        self._on_main(f"after {action}", summed)

    def _decide(self, action: Action) -> None:
        """The host reads what came of the sum."""
        self._on_main(str(action), holds_host=True)

    def _step(self, action: Action) -> None:
        self._on_main(str(action))

    def _close(self, at: int) -> None:
        sent = self.sent.pop(at, [])
        if sent:
            self._on_main("sends have left", *sent)
