"""All-gathers of a chunk's parameters that are under way, layer by layer.

A gather only starts. The forward of a module waits for its own parameters, while those of later
layers may still be on their way; whatever else reads parameters waits for all.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from zorse_megatron.adapter.data_parallel.bucket_groups import UnevenBucketGroup
from zorse_megatron.runtime.collectives import Works


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
            works = [group.gather_bucket(bucket, async_op=True) for bucket in group.buckets]
            self._under_way[number] = Works([work for work in works if work is not None])

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
