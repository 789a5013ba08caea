"""A rank's messages: opened early, launched at their place, copied at most once at each end."""

from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.action_words import parse_action_lists
from zorse_megatron.runtime import transport
from zorse_megatron.runtime.mailbox import ActivationSpec, Mailbox
from zorse_megatron.runtime.transport import NcclTransport
from zorse_megatron.schedule.actions import Action, Kind
from zorse_megatron.schedule.samples import MicroBatch

LENGTH, WIDTH = 3, 2


@dataclass
class FakeWork:
    def wait(self):
        return True


@dataclass
class FakeTransport:
    """Notes what is asked for; messages are the numbers of their samples."""

    events: list = field(default_factory=list)
    sent: list = field(default_factory=list)

    def send(self, tensor, *, peer, tag):
        self.sent.append(tensor)
        return FakeWork()

    def open(self, buffer, *, peer, tag):
        self.events.append(("open", peer, buffer.shape[1]))
        return FakeReceive(self, peer, buffer)


@dataclass
class FakeReceive:
    transport: FakeTransport
    peer: int
    buffer: torch.Tensor

    def launch(self):
        self.transport.events.append(("launch", self.peer, self.buffer.shape[1]))

    def wait(self):
        self.transport.events.append(("wait", self.peer, self.buffer.shape[1]))
        with no_counting():
            self.buffer.fill_(self.peer)


class Copies(TorchDispatchMode):
    """Counts kernels that write memory from other memory."""

    paused = False

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if not Copies.paused and name in {"cat", "copy_", "_to_copy", "clone", "stack", "add"}:
            self.found[name] += 1
        return function(*args, **(kwargs or {}))


@contextmanager
def no_counting():
    Copies.paused = True
    yield
    Copies.paused = False


def mailbox_of(dtype=torch.float32, neighbours=None):
    spec = ActivationSpec(
        sequence_length=LENGTH,
        hidden_size=WIDTH,
        dtype=dtype,
        device=torch.device("cpu"),
        neighbours=neighbours or {},
    )
    return Mailbox(transport=FakeTransport(), spec=spec, global_batch_size=8)


def micro_batch(index: int, start: int, stop: int) -> MicroBatch:
    return MicroBatch(replica=0, index=index, turn=start, start=start, stop=stop)


def actions_of(words: str) -> tuple[Action, ...]:
    return parse_action_lists(f"rank 0: {words}").ranks[0]


def test_a_buffer_is_there_two_computations_before_its_receive_is_launched():
    mailbox = mailbox_of()
    actions = actions_of(
        "1RECV_F0<1[0:1] 1F0 1RECV_F1<2[1:2] 1F1 1RECV_F2<1[2:3] 1F2 1RECV_F3<2[3:4] 1F3"
    )
    mailbox.begin(actions)
    at_turn = []
    for position, action in enumerate(actions):
        mailbox.come_to(position)
        if action.kind is Kind.FORWARD:
            batch = micro_batch(action.micro_batch, action.micro_batch, action.micro_batch + 1)
            mailbox.take(activation=True, chunk=1, micro_batch=batch)
        else:
            mailbox.start_receive(position)
        at_turn.append([f"{event} {peer}" for event, peer, _ in mailbox.transport.events])
        mailbox.transport.events.clear()
    assert at_turn == [
        ["open 1", "open 2", "launch 1"],
        ["open 1", "wait 1"],
        ["launch 2"],
        ["open 2", "wait 2"],
        ["launch 1"],
        ["wait 1"],
        ["launch 2"],
        ["wait 2"],
    ]
    assert not mailbox.incoming


def received(words: str, batch: MicroBatch, **options):
    """What the last action of the words takes, and how often memory was copied for it."""
    mailbox, actions = mailbox_of(**options), actions_of(words)
    mailbox.begin(actions)
    with Copies() as copies:
        for position, _ in enumerate(actions[:-1]):
            mailbox.come_to(position)
            mailbox.start_receive(position)
        taken = mailbox.take(activation=True, chunk=1, micro_batch=batch)
    return taken, copies.found


def test_one_piece_is_handed_over_as_it_is():
    taken, copies = received("1RECV_F0<5[0:3] 1F0", micro_batch(0, 0, 3))
    assert torch.equal(taken, torch.full((LENGTH, 3, WIDTH), 5.0))
    assert not copies


@pytest.mark.parametrize("theirs", [torch.float32, torch.bfloat16])
def test_pieces_are_joined_by_one_kernel_whatever_their_dtype(theirs):
    words = "1RECV_F0<5[0:2] 1RECV_F0<6[2:3] 1RECV_F0<7[3:4] 1F0"
    taken, copies = received(words, micro_batch(0, 0, 4), neighbours={0: theirs})
    assert taken.dtype is torch.float32 and taken.is_contiguous()
    assert taken[:, :, 0].tolist() == [[5.0, 5.0, 6.0, 7.0]] * LENGTH
    assert copies == Counter(cat=1)


def test_one_piece_in_another_dtype_is_converted_once():
    taken, copies = received(
        "1RECV_F0<5[0:1] 1F0", micro_batch(0, 0, 1), neighbours={0: torch.half}
    )
    assert taken.dtype is torch.float32
    assert copies == Counter(_to_copy=1)


@pytest.mark.parametrize(
    ("samples", "neighbours", "copies"),
    [
        ((0, 4), {}, 0),
        ((1, 3), {}, 1),
        ((0, 4), {1: torch.half}, 1),
        ((1, 3), {1: torch.half}, 1),
    ],
)
def test_a_sender_copies_only_what_it_cuts_or_converts(samples, neighbours, copies):
    mailbox = mailbox_of(neighbours=neighbours)
    output = torch.arange(LENGTH * 4 * WIDTH, dtype=torch.float32).view(LENGTH, 4, WIDTH)
    actions = actions_of(f"0SEND_F0>1[{samples[0]}:{samples[1]}]")
    mailbox.begin(actions)
    with Copies() as found:
        mailbox.start_send(0, actions[0], output, micro_batch(0, 0, 4))
    (sent,) = mailbox.transport.sent
    assert found.found.total() == copies
    assert sent.is_contiguous()
    assert torch.equal(sent.float(), output[:, samples[0] : samples[1]])


@dataclass
class FakeStreams:
    """A main stream that has come so far, and what is launched after which point of it."""

    now: int = 0
    after_which: int | None = None

    def mark(self):
        return self.now

    @contextmanager
    def after(self, mark):
        self.after_which = mark
        yield
        self.after_which = None


def test_nccl_receives_wait_for_their_buffer_and_for_nothing_after_it(monkeypatch):
    streams, launched = FakeStreams(), []

    def batch(operations):
        (operation,) = operations
        launched.append((operation.op.__name__, operation.peer, streams.after_which))
        return [FakeWork()]

    @dataclass
    class FakeOperation:
        op: object
        tensor: torch.Tensor
        peer: int
        group: object

    monkeypatch.setattr(transport.dist, "batch_isend_irecv", batch)
    monkeypatch.setattr(transport.dist, "P2POp", FakeOperation)
    nccl = NcclTransport({(1, 0): "in", (0, 1): "out"}, rank=0, streams=streams)
    receive = nccl.open(torch.empty(1), peer=1, tag=0)
    streams.now = 7
    with pytest.raises(AssertionError, match="launched before"):
        receive.wait()
    nccl.send(torch.empty(1), peer=1, tag=0)
    receive.launch()
    receive.wait()
    assert launched == [("isend", 1, None), ("irecv", 1, 0)]
