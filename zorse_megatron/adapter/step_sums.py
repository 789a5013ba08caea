"""What all ranks sum once in a step.

Stock sums several numbers over the world, one collective after the other: whether a rank asks for
the step again, the tokens, whether gradients have inf or nan (where there is a loss scale), and
their squares. Between distant sites each takes a round trip of all ranks. Here all of it is one
sum, made when the passes are over: the norm is that of gradients before they are divided by the
tokens, and known with them.

Source: `finalize_model_grads`, `get_grad_norm_fp32`,
`MixedPrecisionOptimizer._unscale_main_grads_and_check_for_nan` and `_reduce_any` in megatron.core.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist


class StepSums:
    """Numbers that go out in one vector; the host waits once for all that it asks of it."""

    def __init__(self) -> None:
        self.parts: list[torch.Tensor] = []
        """First of all what was summed, after `reduce`."""
        self._num_values = 0
        self._in_host: list[float] | None = None

    def add(self, values: torch.Tensor) -> "Part":
        """Let `values` (on the device, of any shape) be summed, too; or, after `reduce`, be read
        along with the sums."""
        self.parts.append(values.detach().double().reshape(-1))
        first, self._num_values = self._num_values, self._num_values + values.numel()
        return Part(sums=self, first=first, stop=self._num_values)

    def reduce(self, group: dist.ProcessGroup) -> None:
        """Sum over all ranks, in fp64; a collective call, with as many values on each."""
        self.parts = [torch.cat(self.parts)]
        dist.all_reduce(self.parts[0], group=group)

    def in_host(self) -> list[float]:
        """All values for the host, which waits for the device the first time."""
        if self._in_host is None:
            self._in_host = torch.cat(self.parts).tolist()
        return self._in_host


@dataclass(frozen=True, kw_only=True)
class Part:
    """Some of the values."""

    sums: StepSums
    first: int
    stop: int

    @property
    def on_device(self) -> torch.Tensor:
        """[stop - first], fp64; of what was summed."""
        return self.sums.parts[0][self.first : self.stop]

    @property
    def in_host(self) -> list[float]:
        """The values; see `StepSums.in_host`."""
        values = self.sums.in_host()
        assert self.stop <= len(values), "what is added later would need another wait"
        return values[self.first : self.stop]
