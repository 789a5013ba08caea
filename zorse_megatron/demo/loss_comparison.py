"""Are the two runs the same? Their metrics files, compared iteration by iteration."""

import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from zorse_megatron.errors import Problem, ZorseError

MAX_ABS_LOSS_DIFFERENCE = 2e-5
"""fp32 sums in another order move a loss of about 5 by up to 1e-6 an iteration (measured between
stock's own layouts: 9.5e-7 over 20 iterations); a wrong scale or a lost sample moves it by 1e-3 or
more."""
MAX_RELATIVE_GRAD_NORM_DIFFERENCE = 1e-4
# Stock's line (`megatron.training.training:evaluate_and_print_results`), e.g.
# " validation loss at iteration 20 | lm loss value: 3.048148E+00 | lm loss PPL: ..."
_VALIDATION = re.compile(r" validation loss at (.+?) \| lm loss value: ([-+.\dEe]+) \|")


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
class Run:
    """What one run says: iteration by iteration, and at each evaluation."""

    iterations: tuple[Iteration, ...]
    validation_losses: tuple[tuple[str, float], ...]
    """(where, loss), e.g. ("iteration 20", 3.603627); stock prints seven digits."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Both runs, which have the same number of iterations."""

    stock: Run
    plan: Run

    @property
    def pairs(self) -> list[tuple[Iteration, Iteration]]:
        """(stock, plan), iteration by iteration."""
        return list(zip(self.stock.iterations, self.plan.iterations, strict=True))

    @property
    def max_abs_loss_difference(self) -> float:
        """The largest distance of the two losses."""
        return _largest(plan.loss - stock.loss for stock, plan in self.pairs)

    @property
    def max_relative_grad_norm_difference(self) -> float:
        """The largest distance of the two gradient norms, as a part of stock's."""
        return _largest(
            (plan.grad_norm - stock.grad_norm) / stock.grad_norm for stock, plan in self.pairs
        )

    @property
    def max_abs_validation_difference(self) -> float:
        """The largest distance of the two validation losses; infinite if one run has others."""
        stock, plan = dict(self.stock.validation_losses), dict(self.plan.validation_losses)
        if not stock or stock.keys() != plan.keys():
            return math.inf
        return _largest(plan[where] - loss for where, loss in stock.items())

    def check(self) -> None:
        """Raise DemoError with everything in which the runs differ too much."""
        norms = self.max_relative_grad_norm_difference
        compared = (
            ("loss", self.max_abs_loss_difference, MAX_ABS_LOSS_DIFFERENCE),
            ("relative gradient norm", norms, MAX_RELATIVE_GRAD_NORM_DIFFERENCE),
            ("validation loss", self.max_abs_validation_difference, MAX_ABS_LOSS_DIFFERENCE),
        )
        problems = [
            Problem(
                where=f"largest difference in {what}",
                found=f"{found:.3e}",
                expected=f"at most {allowed:.0e}",
                remedy="The plan did not train as one process does: please report it, with "
                "demo.json.",
            )
            for what, found, allowed in compared
            if not found <= allowed
        ]
        if problems:
            raise DemoError("The two runs differ", problems)


def _largest(differences: Iterable[float]) -> float:
    """The largest absolute value; NaN if one is, which `max` may pass over."""
    sizes = [abs(difference) for difference in differences]
    return math.nan if any(map(math.isnan, sizes)) else max(sizes)


def read_run(metrics: Path, log: Path, *, num_iterations: int) -> Run:
    """Read a run's metrics file and log; raises DemoError for an incomplete run."""
    return Run(
        iterations=_read_metrics(metrics, num_iterations),
        validation_losses=tuple(
            (match[1], float(match[2]))
            for match in _VALIDATION.finditer(log.read_text(encoding="utf-8", errors="replace"))
        ),
    )


def _read_metrics(path: Path, num_iterations: int) -> tuple[Iteration, ...]:
    """Read what `--zorse-metrics` wrote: every iteration once, with finite numbers."""
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
