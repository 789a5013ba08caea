"""What Linux says of this machine: memory, processor, network adapters. No GPU is asked.

Sources: proc(5) for /proc; the kernel's documents of sysfs for /sys/class/net and
/sys/class/infiniband.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path

from zorse_megatron.measure.machine.devices import SeenDevice, SeenNic
from zorse_megatron.schema.gpus.device_names import GPU_KIND

_MEGABIT_BYTES = 1e6 / 8


class CpuReader:
    """Takes the CPU for the device of every rank; ranks of a node share its memory."""

    def device(self, local_rank: int, ranks_on_node: int) -> SeenDevice:
        """Return the rank's part of the machine. Never raises."""
        return SeenDevice(
            name=os.environ.get(GPU_KIND) or processor_name(),
            memory_bytes=host_memory_bytes() // ranks_on_node,
            link_type="pcie",
            is_gpu=False,
        )


def host_memory_bytes() -> int:
    """Memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def processor_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """What the processor calls itself; "CPU" where it does not."""
    text = cpuinfo.read_text(encoding="utf-8") if cpuinfo.is_file() else ""
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return f"CPU {' '.join(match[1].split())}" if match else "CPU"


def nics(system: Path = Path("/sys")) -> tuple[SeenNic, ...]:
    """Return the InfiniBand ports, or where there are none the network cards, that are up."""
    return tuple(_infiniband(system)) or tuple(_ethernet(system))


def _infiniband(system: Path) -> Iterator[SeenNic]:
    for port in sorted(system.glob("class/infiniband/*/ports/*")):
        if "ACTIVE" in _line(port / "state"):
            match = re.match(r"([\d.]+) Gb/sec", _line(port / "rate"))
            yield SeenNic(
                name=f"{port.parents[1].name}:{port.name}",
                bytes_per_s=float(match[1]) * 1e3 * _MEGABIT_BYTES if match else None,
            )


def _ethernet(system: Path) -> Iterator[SeenNic]:
    for card in sorted(system.glob("class/net/*")):
        # Bridges, tunnels and the loopback have no device behind them.
        if (card / "device").exists() and _line(card / "operstate") == "up":
            speed = _line(card / "speed")  # megabits; -1 or unreadable on virtual cards
            known = speed.isdecimal() and int(speed) > 0
            yield SeenNic(
                name=card.name, bytes_per_s=int(speed) * _MEGABIT_BYTES if known else None
            )


def _line(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:  # some drivers refuse to say
        return ""
