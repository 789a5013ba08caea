"""Are the two runs the same? Their metrics files, compared iteration by iteration."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from zorse_megatron.errors import Problem, ZorseError

MAX_ABS_LOSS_DIFFERENCE = 2e-5
"""fp32 sums in another order move a loss of about 5 by up to 1e-6 an iteration (measured between
stock's own layouts: 9.5e-7 over 20 iterations); a wrong scale or a lost sample moves it by 1e-3 or
more."""
MAX_RELATIVE_GRAD_NORM_DIFFERENCE = 1e-4


class DemoError(ZorseError):
    """The runs cannot be compared, or differ."""


@dataclass(frozen=True, kw_only=True)
class Iteration:
    """What one run says about one iteration."""

    iteration: int
    loss: float
    grad_norm: float
    learning_rate: float | None
    consumed_samples: int
    elapsed_s: float | None
    """Since the iteration before; None for the first."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Both runs, iteration by iteration."""

    stock: tuple[Iteration, ...]
    plan: tuple[Iteration, ...]

    @property
    def loss_differences(self) -> list[float]:
        """Plan minus stock."""
        return [b.loss - a.loss for a, b in zip(self.stock, self.plan, strict=True)]

    @property
    def max_abs_loss_difference(self) -> float:
        """The largest distance of the two losses."""
        return max(map(abs, self.loss_differences))

    @property
    def max_relative_grad_norm_difference(self) -> float:
        """The largest distance of the two gradient norms, as a part of stock's."""
        return max(
            abs(b.grad_norm - a.grad_norm) / a.grad_norm
            for a, b in zip(self.stock, self.plan, strict=True)
        )

    def check(self) -> None:
        """Raise DemoError with everything in which the runs differ too much."""
        problems = []
        for what, found, allowed in (
            ("loss", self.max_abs_loss_difference, MAX_ABS_LOSS_DIFFERENCE),
            (
                "relative gradient norm",
                self.max_relative_grad_norm_difference,
                MAX_RELATIVE_GRAD_NORM_DIFFERENCE,
            ),
        ):
            if not found <= allowed:
                problems.append(
                    Problem(
                        where=f"largest difference in {what}",
                        found=f"{found:.3e}",
                        expected=f"at most {allowed:.0e}",
                        remedy="The plan did not train as one process does. Please report it with "
                        "demo.json.",
                    )
                )
        if problems:
            raise DemoError("The two runs differ", problems)


def read_metrics(path: Path, *, num_iterations: int) -> tuple[Iteration, ...]:
    """Read what `--zorse-metrics` wrote; raises DemoError unless every iteration is there once."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    records = [json.loads(line) for line in lines]
    found = [record["iteration"] for record in records]
    broken = [r["iteration"] for r in records if r["lm loss"] is None or r["grad_norm"] is None]
    if found != list(range(1, num_iterations + 1)) or broken:
        raise DemoError(
            "A run is incomplete",
            [
                Problem(
                    where=str(path),
                    found=f"iterations {found}, without a finite loss and norm: {broken}",
                    expected=f"each of 1 to {num_iterations} once, with finite numbers",
                    remedy="Look at the log next to it.",
                )
            ],
        )
    return tuple(map(_iteration, records))


def _iteration(record: dict[str, float]) -> Iteration:
    return Iteration(
        iteration=int(record["iteration"]),
        loss=record["lm loss"],
        grad_norm=record["grad_norm"],
        learning_rate=record["learning_rate"],
        consumed_samples=int(record["consumed_samples"]),
        elapsed_s=record["elapsed_s"],
    )


def rows_to_show(num_iterations: int, *, every: int) -> Sequence[int]:
    """Indices of the iterations for a table: the first, every few, the last."""
    return sorted({0, *range(every - 1, num_iterations, every), num_iterations - 1})
