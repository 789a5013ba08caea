"""Host memory for tensors whose bytes leave the device and come back.

Copies run on streams of their own, one for each direction, so that they overlap with computation;
the host never waits for them. On CPU the "host" is other memory of the same machine and a copy is
done when it has been started: the same order of events, which is what tests need.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

import torch

from zorse_megatron.costs.process_memory import pinned_bytes
from zorse_megatron.schedule.shards import state_pieces

T = TypeVar("T")


class HostMemoryFull(Exception):
    """Host memory was asked for that is not there; `category`: what was to wait in it."""

    def __init__(self, category: str, *, asked_bytes: int, found: str, expected: str) -> None:
        self.category = category
        self.asked_bytes = asked_bytes
        self.found = found
        self.expected = expected
        super().__init__(f"{category}: {asked_bytes:,} bytes more; {found}, expected {expected}")


def host_bytes_of(num_bytes: int, *, pinned: bool) -> int:
    """What a block takes of the host: torch's allocator rounds pinned ones up."""
    return pinned_bytes(num_bytes) if pinned else num_bytes


def copied_to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in ordinary memory of the host, for something that leaves the device for a while.

    On CPU other memory, too, so that what counts as on the device is the same there.
    """
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())


def joined_in_host(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """The elements of all tensors, one after the other, in ordinary memory of the host."""
    return torch.cat([tensor.detach().reshape(-1).cpu() for tensor in tensors])


class _FreeBlocks:
    """Blocks of host memory that were given back and serve the next copies, by their size.

    torch's own cache hands a pinned block out again only once the device has done the copies that
    used it. The host runs ahead of the device, so that cache would pin more and more. These blocks
    are reused in the order of the streams: whoever gives one back has let the current stream wait
    for the copy from it, and every copy waits for the current stream.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self._blocks: dict[int, list[torch.Tensor]] = {}

    def put(self, block: torch.Tensor) -> None:
        self.num_bytes += block.nbytes
        self._blocks.setdefault(block.nbytes, []).append(block)

    def take(self, num_bytes: int) -> torch.Tensor | None:
        """A block of exactly this size, if there is one."""
        blocks = self._blocks.get(num_bytes)
        if not blocks:
            return None
        self.num_bytes -= num_bytes
        return blocks.pop()

    def forget(self) -> None:
        self._blocks.clear()
        self.num_bytes = 0


Copy = Any
"""A copy under way, such as the CUDA event after it; only its link knows what to do with it."""


class HostLink:
    """The copy streams of one device, to host memory and back; counts what waits in the host.

    A rank is given its link. A subclass may be one whose copies take other times; what is going to
    be copied is told it before (`expect_activations`, `expect_state`).
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.limit_bytes: int | None = None
        """What this rank may take of the host's memory; None: all that there is."""
        self.held: Counter[str] = Counter()
        """Host memory in use, by category."""
        self._free = _FreeBlocks()
        self.is_cuda = device.type == "cuda"
        self._to_host = torch.cuda.Stream(device) if self.is_cuda else None
        self._from_host = torch.cuda.Stream(device) if self.is_cuda else None
        self.sent_bytes = 0
        """Copied to the host since the start."""
        self.brought_bytes = 0
        """Copied back since the start."""

    @property
    def host_bytes(self) -> int:
        """Host memory in use."""
        return self.held.total()

    @property
    def allocated_bytes(self) -> int:
        """Host memory in use, and what is kept for the next copies."""
        return self.host_bytes + self._free.num_bytes

    def new_host_bytes(self, num_bytes: int, category: str) -> torch.Tensor:
        """Host memory that the device can copy to and from without a detour (pinned).

        Copies may still use it: the host itself reads and writes it after a wait for the device.
        Raises HostMemoryFull beyond the limit, or where the machine has no more.
        """
        taken = host_bytes_of(num_bytes, pinned=self.is_cuda)
        limit = self.limit_bytes
        if limit is not None and self.host_bytes + taken > limit:
            raise HostMemoryFull(
                category,
                asked_bytes=taken,
                found=f"{self.host_bytes + taken:,} bytes of host memory",
                expected=f"at most {limit:,} bytes, this rank's part of it",
            )
        block = self._free.take(taken)
        if block is None:
            if limit is not None and self.allocated_bytes + taken > limit:
                self._release_free()
            block = self._allocated(taken, category)
        self.held[category] += taken
        return block[:num_bytes]

    def give_back(self, host: torch.Tensor, category: str) -> None:
        """Keep host memory for the next copies.

        The current stream has waited for the last copy from it, if there was one; copies to the
        host run one after the other.
        """
        block = torch.empty(0, dtype=torch.uint8).set_(host.untyped_storage())
        self.held[category] -= block.nbytes
        self._free.put(block)

    def _allocated(self, num_bytes: int, category: str) -> torch.Tensor:
        for is_last in (False, True):
            try:
                return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self.is_cuda)
            except RuntimeError as error:  # so does CUDA report that it cannot pin any more
                if is_last:
                    raise HostMemoryFull(
                        category,
                        asked_bytes=num_bytes,
                        found=f"no more host memory beyond {self.host_bytes:,} bytes",
                        expected=f"{num_bytes:,} bytes more",
                    ) from error
                self._release_free()
        raise AssertionError("returned or raised above")

    def _release_free(self) -> None:
        """Give the machine back what is not in use: blocks of other sizes are needed."""
        self._free.forget()
        if self.is_cuda:
            torch.cuda.synchronize(self.device)  # what copies use stays in torch's cache
            torch.accelerator.empty_host_cache()

    def start_to_host(self, source: torch.Tensor, host: torch.Tensor) -> Copy | None:
        """Copy after all that the current stream has been given; returns what to wait for."""
        self.sent_bytes += source.nbytes
        return self._copy(source, host, self._to_host)

    def start_from_host(self, host: torch.Tensor, target: torch.Tensor) -> Copy | None:
        """Copy back; `target` must not be read before the current stream waits for the result."""
        self.brought_bytes += target.nbytes
        return self._copy(host, target, self._from_host)

    def hold_back(self, copied: Any) -> None:
        """Let the current stream wait for a copy that this link has started."""
        torch.cuda.current_stream(self.device).wait_event(copied)

    def expect_activations(self, memories: "Sequence[HostBacked]") -> None:
        """Told what a forward has kept, before it is sent. Here nothing depends on it."""

    def expect_state(self, state: Any) -> None:
        """Told the `HostState` of an optimizer, once it is made. Here nothing depends on it."""

    def piece_sizes(self, shards: Sequence[Any]) -> Sequence[int]:
        """Elements of each piece in which the state of shards (`OwnedShard`) comes and goes."""
        return state_pieces(sum(shard.tensor.numel() for shard in shards))

    def _copy(
        self, source: torch.Tensor, target: torch.Tensor, stream: "torch.cuda.Stream | None"
    ) -> "torch.cuda.Event | None":
        if stream is None:
            target.copy_(source)
            return None
        # After what wrote the source, and after what last used the memory of the target.
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            return stream.record_event()


class HostBacked:
    """One storage on the device that can wait in the host.

    All tensors that share the storage stay what they are; while `is_away` they must not be used.
    """

    def __init__(self, tensor: torch.Tensor, link: HostLink | None, category: str) -> None:
        """Takes over the storage of `tensor`, whole; without a link it can only come and go.

        `category`: what it counts as in the host.
        """
        self.category = category
        self.storage = tensor.untyped_storage()
        self.num_bytes = self.storage.nbytes()
        self.link = link
        self.host: torch.Tensor | None = None
        self.is_away = False
        self._parts: list[HostBacked] = []
        self._leaving: Copy | None = None
        self._coming: Copy | None = None
        self._is_leaving = False

    def part(self, tensor: torch.Tensor, start_bytes: int) -> "HostBacked":
        """A part of the bytes in the host, with memory of its own on the device.

        `tensor`: a whole storage, as long as the part; what is in it is lost, for the part starts
        as one that is away. What is sent is in the host's bytes of the whole from then on.
        """
        assert self.host is not None, "nothing was sent to the host"
        part = HostBacked(tensor, self.link, self.category)
        part.host = self.host[start_bytes : start_bytes + part.num_bytes]
        part.drop()
        self._parts.append(part)
        return part

    @property
    def is_in_host(self) -> bool:
        """Whether the host has had its bytes, at some time."""
        return self.host is not None

    def send(self) -> None:
        """Start to copy to the host; `let_go` frees the device's memory when that is done."""
        assert not self.is_away, "the memory is in the host already"
        assert self.link is not None, "there is no link to the host"
        if self.host is None:
            self.host = self.link.new_host_bytes(self.num_bytes, self.category)
        self._leaving = self.link.start_to_host(self._bytes(), self.host)
        self._is_leaving = True

    def let_go(self) -> None:
        """Free the device's memory after the copy, if one is under way.

        That holds back the current stream, not the host.
        """
        if not self._is_leaving:
            return
        if self._leaving is not None and self.link is not None:
            self.link.hold_back(self._leaving)
        self._leaving, self._is_leaving = None, False
        self.drop()

    def drop(self) -> None:
        """Free the device's memory; the host has its bytes, or they are not needed any more."""
        self.storage.resize_(0)
        self.is_away = True

    def allocate(self) -> None:
        """Have memory on the device again, with nothing in it."""
        self.let_go()
        self.storage.resize_(self.num_bytes)
        self.is_away = False

    def start_in_host(self, value: torch.Tensor) -> None:
        """Free the device's memory and let `value`, on the CPU, be what waits in the host."""
        assert self.host is None and self.link is not None, "the host has something already"
        self.drop()
        self.host = self.link.new_host_bytes(self.num_bytes, self.category)
        self.in_host(torch.uint8, 0, self.num_bytes).copy_(value.view(-1).view(torch.uint8))

    def start_back(self) -> None:
        """Start to copy back to the device; `wait_until_back` comes before the first use."""
        if self._is_leaving:  # it has not gone yet
            self._leaving, self._is_leaving = None, False
            return
        if not self.is_away:
            return
        assert self.link is not None and self.host is not None, "nothing was sent to the host"
        self.allocate()
        self._coming = self.link.start_from_host(self.host, self._bytes())

    def wait_until_back(self) -> None:
        """Let the current stream wait for `start_back`, after starting it if nobody has."""
        self.start_back()
        if self._coming is not None and self.link is not None:
            self.link.hold_back(self._coming)
            self._coming = None

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """What `tensor`, a contiguous view of the storage, would show.

        That is the tensor itself, or while the storage is away what `read_in_host` returns.
        """
        if not self.is_away:
            return tensor
        return self.read_in_host(tensor.dtype, *_elements(tensor)).view(tensor.shape)

    def write(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """Put values of any device and type where `tensor`, a contiguous view, is now."""
        if not self.is_away:
            tensor.copy_(value.view_as(tensor))
            return
        self.in_host(tensor.dtype, *_elements(tensor)).copy_(value.reshape(-1))

    def read_in_host(self, dtype: torch.dtype, start: int, stop: int) -> torch.Tensor:
        """Elements as in `in_host`, to be given to a checkpoint: never a whole storage.

        Megatron's writer copies a CPU tensor that is part of something larger; a whole one it
        writes as it is, maybe while training goes on (`FileSystemWriterAsync.prepare_write_data`).
        """
        part = self.in_host(dtype, start, stop)
        return part if part.nbytes < self.num_bytes else copied_to_host(part)

    def in_host(self, dtype: torch.dtype, start: int, stop: int) -> torch.Tensor:
        """Elements [start, stop) of the storage among the host's bytes, which no copy uses now.

        Parts that are on the device go to the host: who asks may read, or write.
        """
        assert self.host is not None, "nothing was sent to the host"
        for part in self._parts:
            if not part.is_away:
                part.wait_until_back()  # it may be coming still
                part.send()
                part.let_go()
        if self.link is not None and self.link.is_cuda:
            torch.cuda.synchronize(self.link.device)
        return self.host[start * dtype.itemsize : stop * dtype.itemsize].view(dtype)

    def forget_host(self) -> None:
        """Give the host's memory back."""
        if self.link is not None and self.host is not None:
            self.link.give_back(self.host, self.category)
            self.host = None

    def _bytes(self) -> torch.Tensor:
        """The whole storage as bytes."""
        empty = torch.empty(0, dtype=torch.uint8, device=self.storage.device)
        return empty.set_(self.storage)


def _elements(view: torch.Tensor) -> tuple[int, int]:
    """From where to where a contiguous view is in its storage."""
    first = int(view.storage_offset())
    return first, first + view.numel()


# A thread that does things for the host one after the other, while the host goes on.


class HostWorker:
    """The thread; it starts with the first task, so that a process can be forked before."""

    def __init__(self) -> None:
        self._tasks: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, act: Callable[[], T]) -> Future[T]:
        """Have `act` done when all tasks before it are; whoever waits for it gets its error."""
        done: Future[T] = Future()
        self._tasks.put((done, act))
        if self._thread is None:
            # A daemon: a peer that died may leave it in a call that never ends.
            self._thread = threading.Thread(target=self._run, name="zorse-host", daemon=True)
            self._thread.start()
        return done

    def _run(self) -> None:
        while True:
            _finish(*self._tasks.get())


def _finish(done: Future[Any], act: Callable[[], Any]) -> None:
    """Do a task; what it has worked on is let go before anybody hears that it is done."""
    result, failure = None, None
    try:
        result = act()
    except BaseException as error:  # it is the waiter's
        failure = error
    del act
    if failure is None:
        done.set_result(result)
    else:
        done.set_exception(failure)
