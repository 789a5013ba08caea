"""How fast the kernels are on this GPU, against its own copies and against plain torch.

    python scripts/bench_kernels.py --json

For each kernel and size (bytes read and written): its bandwidth as a share of that of a copy of as
many bytes, its speed against the fastest of several sequences of torch's operations, and against
the fastest of them under torch.compile. Exit status 1 where a target is missed, 2 without a GPU.

`--dry`: the same code at small sizes on the CPU, "compiled" by the backend that compiles nothing;
its figures mean nothing. What to expect is in docs/performance.md.
"""

import argparse
import json
import platform
import sys
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any

import torch
from torch.utils.benchmark import Timer

from zorse_megatron.kernels.bench_cases import CASES, Case, Work, copy_case
from zorse_megatron.kernels.dispatch import why_not_triton

MIN_SHARE_OF_COPY, MIN_OVER_EAGER, MIN_OVER_COMPILED = 0.85, 1.5, 1.0
SIZES_BYTES = (64_000_000, 512_000_000, 4_000_000_000)
DRY_SIZES_BYTES = (400_000,)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One kernel at one size; times are medians."""

    kernel: str
    num_bytes: int
    copy_bytes_per_s: float
    kernel_s: float
    eager_s: dict[str, float]
    compiled_s: dict[str, float]

    @property
    def figures(self) -> dict[str, float]:
        """What the targets are about."""
        return {
            "share_of_copy": self.num_bytes / self.kernel_s / self.copy_bytes_per_s,
            "over_eager": min(self.eager_s.values()) / self.kernel_s,
            "over_compiled": min(self.compiled_s.values()) / self.kernel_s,
        }

    @property
    def reached(self) -> dict[str, bool]:
        """Each target."""
        targets = (MIN_SHARE_OF_COPY, MIN_OVER_EAGER, MIN_OVER_COMPILED)
        figures = self.figures.items()
        return {
            name: found >= target for (name, found), target in zip(figures, targets, strict=True)
        }


def median_s(work: Work, min_run_time_s: float) -> float:
    """Median time of a call among many in a row (the GPU is waited for after each block of them).

    The first call, which may compile, is not among them.
    """
    work()
    timer = Timer("work()", globals={"work": work})
    return timer.blocked_autorange(min_run_time=min_run_time_s).median


def measured(case: Case, copy_bytes_per_s: float, options: argparse.Namespace) -> Row:
    """Time the kernel and all alternatives."""
    torch._dynamo.reset()
    backend = "eager" if options.dry else "inductor"
    compiled = {name: torch.compile(work, backend=backend) for name, work in case.plain.items()}
    eager = case.plain | case.not_compiled
    row = Row(
        kernel=case.name,
        num_bytes=case.num_bytes,
        copy_bytes_per_s=copy_bytes_per_s,
        kernel_s=median_s(case.kernel, options.seconds),
        eager_s={name: median_s(work, options.seconds) for name, work in eager.items()},
        compiled_s={name: median_s(work, options.seconds) for name, work in compiled.items()},
    )
    print(line_of(row), file=sys.stderr, flush=True)
    return row


def line_of(row: Row) -> str:
    """For people."""
    figures = row.figures
    return (
        f"{row.kernel} {row.num_bytes / 1e6:g} MB: {row.num_bytes / row.kernel_s / 1e9:.1f} GB/s, "
        f"{figures['share_of_copy']:.0%} of a copy, {figures['over_eager']:.2f} x eager, "
        f"{figures['over_compiled']:.2f} x compiled"
    )


def rows_of(device: torch.device, options: argparse.Namespace) -> list[Row]:
    """All kernels at all sizes; one case at a time is in memory."""
    rows = []
    for num_bytes in options.sizes:
        yardstick = copy_case(num_bytes, device)
        copy_bytes_per_s = yardstick.num_bytes / median_s(yardstick.kernel, options.seconds)
        del yardstick
        rows += [measured(case(num_bytes, device), copy_bytes_per_s, options) for case in CASES]
    return rows


def setting(device: torch.device, options: argparse.Namespace) -> dict[str, Any]:
    """Where and with what this was measured."""
    on_gpu = device.type == "cuda"
    return {
        "dry": options.dry,
        "device": torch.cuda.get_device_name(device) if on_gpu else platform.processor() or "CPU",
        "torch": torch.__version__,
        "triton": next((d.version for d in metadata.distributions(name="triton")), None),
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "in_plain_torch_because": why_not_triton(device),
    }


def main() -> int:
    """Run the benchmark and print its result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--dry", action="store_true", help="dry run: small sizes on the CPU")
    parser.add_argument("--sizes", type=int, nargs="+", help="bytes (default: 64 MB to 4 GB)")
    parser.add_argument("--seconds", type=float, help="seconds per measurement (default: 0.5)")
    options = parser.parse_args()
    if not options.dry and not torch.cuda.is_available():
        parser.error("found no GPU; expected one, or --dry to try the script without")
    options.sizes = options.sizes or (DRY_SIZES_BYTES if options.dry else SIZES_BYTES)
    options.seconds = options.seconds or (0.001 if options.dry else 0.5)
    device = torch.device("cpu" if options.dry else "cuda:0")
    with redirect_stdout(sys.stderr):  # what the kernels say is no JSON
        where, rows = setting(device, options), rows_of(device, options)
    described = [asdict(row) | row.figures | {"reached": row.reached} for row in rows]
    if options.json:
        print(json.dumps(where | {"rows": described}, indent=1))
    else:
        print(
            "\n".join([*(f"{key}: {value}" for key, value in where.items()), *map(line_of, rows)])
        )
    return 0 if options.dry or all(all(row.reached.values()) for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
