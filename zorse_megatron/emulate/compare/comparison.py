"""The comparison's rows, and what they are measured against."""

from collections.abc import Sequence
from dataclasses import dataclass

from zorse_megatron.emulate.compare.compared_systems import STOCK, ComparedSystem
from zorse_megatron.emulate.jobs.emulator import EmulatedRun
from zorse_megatron.planner.inputs.search_inputs import Inputs


@dataclass(frozen=True, kw_only=True)
class ComparisonRow:
    """One system; None where it has no such value."""

    system: str
    layout: str
    reason: str
    """Why it does not fit or cannot be trained; empty where it can."""
    valid: bool | None
    """Whether its self-test was passed; None: it was simulated only."""
    iteration_s: float | None
    """Emulated, the median; simulated where nothing is emulated."""
    tokens_per_s: float | None
    speedup_vs_stock: float | None
    """Against stock's best layout."""
    efficiency_of_aggregate: float | None
    """Tokens/s over the sum of what each GPU of the cluster would do alone."""
    peak_memory_fraction: float | None
    """Highest simulated peak of a GPU over what it may hold."""
    predicted_iteration_s: float | None
    prediction_error: float | None
    """(predicted - emulated) / emulated."""
    final_loss: float | None


@dataclass(frozen=True, kw_only=True)
class Result:
    """A compared system, and its run if there was one."""

    compared: ComparedSystem
    run: EmulatedRun | None = None
    is_emulated: bool = True
    """Whether it was to run; else the simulator's figure is its result."""

    @property
    def iteration_s(self) -> float | None:
        """None where there is no number."""
        if not self.is_emulated:
            return self.compared.predicted_s
        if self.run is None or self.run.out_of_memory is not None:
            return None
        return self.run.iteration_s

    @property
    def outcome(self) -> str:
        """For people: why there is no number; empty where there is one."""
        if self.iteration_s is not None:
            return ""
        if self.run is not None:
            return "out of memory"
        return "does not fit" if self.compared.predicted_s is None else "cannot be trained yet"


def rows_of(results: Sequence[Result], inputs: Inputs) -> list[ComparisonRow]:
    """Compute the rows, in the order of the results."""
    tokens = inputs.global_batch_size * inputs.sequence_length
    alone = aggregate_tokens_per_s(inputs)
    stock_s = {result.compared.name: result.iteration_s for result in results}.get(STOCK)
    return [_row(result, tokens=tokens, alone=alone, stock_s=stock_s) for result in results]


def aggregate_tokens_per_s(inputs: Inputs) -> float:
    """Tokens/s of all GPUs together if each trained the whole model alone, memory aside.

    Each at its best micro-batch size, nothing recomputed, no communication.
    """
    return inputs.sequence_length * sum(_samples_per_s(inputs, kind) for kind in inputs.kinds)


def _samples_per_s(inputs: Inputs, kind: str) -> float:
    rates = []
    for size in inputs.best_sizes[kind]:
        layer, ends = (
            inputs.compute.layer(kind, size),
            [
                inputs.compute.embedding(kind, size),
                inputs.compute.head(kind, size),
            ],
        )
        whole_s = inputs.num_layers * (layer.forward_s + layer.backward_s)
        rates.append(size / (whole_s + sum(e.forward_s + e.backward_s for e in ends)))
    return max(rates)


def _row(result: Result, *, tokens: float, alone: float, stock_s: float | None) -> ComparisonRow:
    compared, run, seconds = result.compared, result.run, result.iteration_s
    predicted_s, is_measured = compared.predicted_s, run is not None and seconds is not None
    rate = None if seconds is None else tokens / seconds
    return ComparisonRow(
        system=compared.name,
        layout=compared.layout,
        reason=compared.reason,
        valid=(run is not None and run.self_test.is_valid) if result.is_emulated else None,
        iteration_s=seconds,
        tokens_per_s=rate,
        speedup_vs_stock=stock_s / seconds if stock_s and seconds else None,
        efficiency_of_aggregate=None if rate is None else rate / alone,
        peak_memory_fraction=compared.peak_memory_fraction,
        predicted_iteration_s=predicted_s,
        prediction_error=predicted_s / seconds - 1
        if is_measured and seconds and predicted_s
        else None,
        final_loss=run.losses[-1] if run is not None and is_measured else None,
    )
