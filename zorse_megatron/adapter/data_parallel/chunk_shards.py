"""A chunk of which a rank keeps only its shards: parameters are unsharded on demand.

The counterpart of ZeRO-3 for Megatron's DDP wrapper, chunk by chunk: UNSHARD makes the parameters
whole, RESHARD lets them go, the first backward of a step brings the gradients' memory, REDUCE_GRAD
sums them into the owners' shards and lets the rest go (Zorse, MLSys 2026, "Pipeline-Efficient ZeRO
DP"; Cephalo, ICS 2025, section 4, for one group). The shards then are authoritative: the optimizer
reads and writes them, and what was unsharded is made from them.

The order of communication is that of the action lists, which is the same on all ranks of a group.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from zorse_megatron.adapter.data_parallel.buckets import UnevenBucketGroup
from zorse_megatron.runtime.collectives import Works
from zorse_megatron.runtime.host_link import HostLink
from zorse_megatron.runtime.offload import GradientsInHost
from zorse_megatron.runtime.sharded_buffer import ShardedBuffer


class ChunkShards:
    """The memory of one `UnevenDistributedDataParallel` chunk whose buckets have been cut.

    Parameters stay unsharded until `reshard` is called for the first time: when the chunk has been
    built, before the next one is. Optimizer and checkpoints do with the shards.
    """

    def __init__(
        self, ddp: Any, link: HostLink | None = None, *, buffers: Sequence[Any] | None = None
    ) -> None:
        """`link`: for parameters and gradients that may wait in the host.

        `buffers`: those of which this rank keeps its intervals; None: all.
        """
        self.bucket_groups: list[UnevenBucketGroup] = ddp.bucket_groups
        self.group = ddp.intra_dp_cp_group
        self._position: dict[torch.nn.Parameter, tuple[int, int]] = {}
        self.parameters: list[ShardedBuffer] = []
        self.gradients: list[ShardedBuffer] = []
        for number, buffer in enumerate(ddp.buffers if buffers is None else buffers):
            owned = [_owned(bucket, self.group.rank()) for bucket in buffer.buckets]
            self.parameters.append(ShardedBuffer(buffer.param_data, owned, link))
            self.gradients.append(ShardedBuffer(buffer.grad_data, owned, link, "gradients"))
            for parameter, (start, *_) in buffer.param_index_map.items():
                self._position[parameter] = number, start
        self.full: Sequence[ShardedBuffer] = self.parameters
        """Parameters as layers compute with them, while they are there."""
        self._gathers: ParameterGathers = ddp.gathers
        self._reduction: Works | None = None
        self._reduced = False
        self.gradients_in_host = GradientsInHost(self.gradients)
        self._close_gradients()

    # Parameters.

    @property
    def is_unsharded(self) -> bool:
        """Whether the parameters are there, or on their way."""
        return all(buffer.is_unsharded for buffer in self.full)

    def unshard(self) -> None:
        """Start to unshard the parameters, in the order in which a forward asks for them."""
        if self.is_unsharded:
            return
        for buffer in self.parameters:
            buffer.restore()
        self._gathers.start()

    def wait_until_unsharded(self) -> None:
        """Wait for all that `unshard` has started."""
        self._gathers.wait()

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Have this rank's shards on the device within the block."""
        away = self._away()
        for buffer in away:
            buffer.bring()
        try:
            yield
        finally:
            for buffer in away:
                buffer.offload()

    @contextmanager
    def owned_in_place(self) -> Iterator[None]:
        """Have what this rank owns where unsharded parameters would have it; all else is junk.

        For stock's code that reads what is owned out of unsharded parameters; no communication.
        """
        for buffer in self.parameters:
            buffer.restore()
        try:
            yield
        finally:
            self.reshard()

    def reshard(self) -> None:
        """Keep this rank's shard of the parameters only."""
        self.wait_until_unsharded()
        for buffer in self.parameters:
            buffer.keep_shard()
            buffer.free()

    def fetch(self) -> None:
        """Start to bring the shard back from the host."""
        for buffer in self.parameters:
            buffer.fetch()

    def offload(self) -> None:
        """Let the shard wait in the host."""
        for buffer in self.parameters:
            buffer.offload()

    def mark_changed(self) -> None:
        """The optimizer has stepped the shards: the host's copies are old."""
        for buffer in self.parameters:
            buffer.changed = True

    def parameter_piece(self, parameter: torch.nn.Parameter, start: int, stop: int) -> torch.Tensor:
        """Elements [start, stop) of a parameter, all owned by this rank, where they are true."""
        number, offset = self._position[parameter]
        return self.parameters[number].piece(offset + start, offset + stop)

    def read(self, parameter: torch.nn.Parameter, start: int, stop: int) -> torch.Tensor:
        """Elements as in `parameter_piece`; as a CPU tensor if they wait in the host."""
        number, offset = self._position[parameter]
        return self.parameters[number].read(offset + start, offset + stop)

    def write(
        self, parameter: torch.nn.Parameter, start: int, stop: int, values: torch.Tensor
    ) -> None:
        """Set elements as in `parameter_piece`, wherever they are now."""
        number, offset = self._position[parameter]
        self.parameters[number].write(offset + start, offset + stop, values)

    def _away(self) -> list[ShardedBuffer]:
        """Buffers whose shards wait in the host."""
        return [b for b in self.parameters if b.in_shard and b.memory and b.memory.is_away]

    @property
    def parameter_bytes(self) -> int:
        """What parameters take of the device now."""
        return sum(buffer.held_bytes for buffer in self.parameters)

    @property
    def gradient_bytes(self) -> int:
        """What gradients take of the device now."""
        return sum(buffer.held_bytes for buffer in self.gradients)

    # Gradients.

    def open_gradients(self) -> None:
        """Have unsharded gradients, zero at first, to accumulate into."""
        if self._reduced:
            raise RuntimeError("this chunk's gradients have been reduced already in this step")
        for buffer in self.gradients:
            if not buffer.is_unsharded:
                buffer.allocate()
                buffer.full.zero_()

    def start_reduction(self) -> None:
        """Start to sum the gradients into the owners' shards; zeros where no backward was."""
        self.open_gradients()
        works = []
        for group in self.bucket_groups:
            group.prepare_gradients()
            works += [group.reduce_bucket(bucket) for bucket in group.buckets]
        self._reduction = Works(works)
        self._reduced = True

    @property
    def reduction_bytes(self) -> int:
        """What the reduction under way holds beside the gradients."""
        return 0 if self._reduction is None else self._reduction.buffer_bytes

    def finish_reduction(self) -> None:
        """Wait for the sums, keep this rank's shard of them and let the rest go."""
        if self._reduction is None:
            return
        self._reduction.wait()
        self._reduction = None
        for buffer in self.gradients:
            buffer.keep_shard()
            buffer.free()

    def zero_gradients(self) -> None:
        """Forget all gradients: a new step begins."""
        self.finish_reduction()
        self._close_gradients()
        self._reduced = False

    def gradient_piece(self, parameter: torch.nn.Parameter, start: int, stop: int) -> torch.Tensor:
        """Elements [start, stop) of a parameter's gradient, all owned by this rank."""
        number, offset = self._position[parameter]
        return self.gradients[number].piece(offset + start, offset + stop)

    def _close_gradients(self) -> None:
        self.gradients_in_host.forget()
        for buffer in self.gradients:
            buffer.drop_shard()
            buffer.free()


def _owned(bucket: Any, group_rank: int) -> tuple[int, int]:
    """This rank's interval of a bucket, as a place in the buffer."""
    start, stop = bucket.shard_bounds[group_rank]
    return bucket.offset + start, bucket.offset + stop


# All-gathers of a chunk's parameters that are under way, layer by layer.
#
# A gather only starts. The forward of a module waits for its own parameters, while those of later
# layers may still be on their way; whatever else reads parameters waits for all.


class ParameterGathers:
    """Those of one chunk, whose buckets have been cut."""

    def __init__(
        self,
        module: torch.nn.Module,
        bucket_groups: Sequence[UnevenBucketGroup],
    ) -> None:
        """`bucket_groups`: of the parameters of `module`."""
        self.bucket_groups = tuple(bucket_groups)
        self._under_way: dict[int, Works] = {}
        """By the number of the bucket group."""
        self._group_of = {
            id(parameter): number
            for number, bucket_group in enumerate(self.bucket_groups)
            for bucket in bucket_group.buckets
            for parameter in bucket.params
        }
        for each in module.modules():
            if next(each.parameters(recurse=False), None) is not None:
                each.register_forward_pre_hook(self._wait_for_own)

    def start(self) -> None:
        """Start to gather all parameters, in the order in which a forward asks for them."""
        assert not self._under_way, "these parameters are being gathered already"
        for number in reversed(range(len(self.bucket_groups))):
            group = self.bucket_groups[number]
            self._under_way[number] = Works([group.gather_bucket(b) for b in group.buckets])

    def wait(self) -> None:
        """Wait for all that `start` has started."""
        for number in list(self._under_way):
            self._under_way.pop(number).wait()

    def _wait_for_own(self, module: torch.nn.Module, _inputs: Any) -> None:
        """Computation starts when its layer is there; later ones may be on their way still."""
        if self._under_way:
            for parameter in module.parameters(recurse=False):
                works = self._under_way.pop(self._group_of.get(id(parameter), -1), None)
                if works is not None:
                    works.wait()


def wait_for_parameters(chunks: Iterable[Any]) -> None:
    """Wait until no gather of these wrapped chunks is under way."""
    for chunk in chunks:
        chunk.gathers.wait()
