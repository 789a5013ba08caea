"""What NVIDIA's driver says of a GPU, through NVML (package nvidia-ml-py).

Names are those of NVML's API reference (nvmlDeviceGetNvLinkState and others).
"""

from typing import Any

from zorse_megatron.errors import MeasureError, Problem
from zorse_megatron.measure.machine.devices import SeenDevice
from zorse_megatron.schema.gpus.gpu import LinkType


def load_nvml() -> Any:
    """Import and start NVML. Raises MeasureError where it is not installed or has no driver."""
    try:
        import pynvml
    except ImportError as error:
        raise _error("no package nvidia-ml-py", "Run: pip install nvidia-ml-py.") from error
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise _error(f"a driver that does not answer ({error})", "Try nvidia-smi.") from error
    return pynvml


class NvmlReader:
    """Reads GPUs. `nvml`: the module pynvml; `uuids`: of the GPUs that this process may use."""

    def __init__(self, nvml: Any, uuids: tuple[str, ...]) -> None:
        self._nvml = nvml
        self._uuids = uuids

    def device(self, local_rank: int, ranks_on_node: int) -> SeenDevice:
        """Return the GPU of a rank. Raises MeasureError where there is none.

        A launcher may show each rank only its own GPU.
        """
        number = 0 if len(self._uuids) == 1 else local_rank
        if number >= len(self._uuids):
            raise _error(
                f"local rank {local_rank} and {len(self._uuids)} GPUs",
                "Start one rank for each GPU.",
            )
        try:
            return self._described(self._nvml.nvmlDeviceGetHandleByUUID(self._uuids[number]))
        except self._nvml.NVMLError as error:
            found = f"no answer about {self._uuids[number]} ({error})"
            raise _error(found, "Try nvidia-smi -L: it lists what the driver knows.") from error

    def _described(self, handle: Any) -> SeenDevice:
        name = self._nvml.nvmlDeviceGetName(handle)
        return SeenDevice(
            name=name.decode() if isinstance(name, bytes) else name,
            memory_bytes=self._memory_bytes(handle),
            link_type=self._link_type(handle),
            is_gpu=True,
        )

    def _memory_bytes(self, handle: Any) -> int:
        """What CUDA can give a program: all but what the driver and the firmware keep.

        NVML tells that part since its second version of the question: of a T4's 15,360 MiB 449.
        """
        version = getattr(self._nvml, "nvmlMemory_v2", None)
        if version is None:
            return int(self._nvml.nvmlDeviceGetMemoryInfo(handle).total)
        memory = self._nvml.nvmlDeviceGetMemoryInfo(handle, version)
        return int(memory.total) - int(memory.reserved)

    def _link_type(self, handle: Any) -> LinkType:
        """Where the NVLink lines that are on lead: to a switch or a GPU; without any: PCIe."""
        found: LinkType = "pcie"
        for line in range(self._nvml.NVML_NVLINK_MAX_LINKS):
            try:
                if not self._nvml.nvmlDeviceGetNvLinkState(handle, line):
                    continue
                remote = self._nvml.nvmlDeviceGetNvLinkRemoteDeviceType(handle, line)
            except self._nvml.NVMLError:  # not supported, or beyond the last line
                continue
            if remote == self._nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH:
                return "nvswitch"
            if remote == self._nvml.NVML_NVLINK_DEVICE_TYPE_GPU:
                found = "nvlink"
        return found


def _error(found: str, remedy: str) -> MeasureError:
    problem = Problem(
        where="NVML", found=found, expected="NVIDIA's management library", remedy=remedy
    )
    return MeasureError("the GPUs cannot be asked what they are", [problem])
