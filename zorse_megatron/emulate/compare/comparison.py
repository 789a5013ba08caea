"""The comparison's rows, and what they are measured against."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from zorse_megatron.emulate.compare.compared_systems import BEST_GPUS, STOCK, ComparedSystem
from zorse_megatron.emulate.jobs.emulator import EmulatedRun
from zorse_megatron.planner.inputs.search_inputs import Inputs


@dataclass(frozen=True, kw_only=True)
class ComparisonRow:
    """One system; None where it has no such number."""

    system: str
    layout: str
    valid: bool
    """Whether its self-test was passed."""
    iteration_s_median: float | None
    tokens_per_s: float | None
    speedup_vs_stock: float | None
    efficiency_of_aggregate: float | None
    """Tokens/s over the sum of what each GPU of the cluster would do alone."""
    predicted_iteration_s: float | None
    prediction_error: float | None
    """(predicted - measured) / measured."""
    final_loss: float | None


@dataclass(frozen=True, kw_only=True)
class Result:
    """A compared system, and its run if there was one."""

    compared: ComparedSystem
    run: EmulatedRun | None

    @property
    def outcome(self) -> str:
        """For people: why there is no number; empty where there is one."""
        if self.run is None:
            return self.compared.reason
        return "out of memory" if self.run.out_of_memory else ""


def rows_of(results: Sequence[Result], inputs: Inputs) -> list[ComparisonRow]:
    """Compute the rows, in the order of the results."""
    tokens = inputs.global_batch_size * inputs.sequence_length
    alone = aggregate_tokens_per_s(inputs)
    measured = {result.compared.name: _measured_s(result) for result in results}
    stock_s = measured.get(STOCK) or measured.get(BEST_GPUS)
    return [_row(result, tokens=tokens, alone=alone, stock_s=stock_s) for result in results]


def aggregate_tokens_per_s(inputs: Inputs) -> float:
    """Tokens/s of all GPUs together if each trained the whole model alone, memory aside.

    Each at its best micro-batch size, nothing recomputed, no communication.
    """
    return inputs.sequence_length * sum(_samples_per_s(inputs, kind) for kind in inputs.kinds)


def as_json(rows: Sequence[ComparisonRow]) -> list[dict[str, Any]]:
    """Rows as plain values."""
    return [asdict(row) for row in rows]


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


def _measured_s(result: Result) -> float | None:
    if result.run is None or result.run.out_of_memory is not None:
        return None
    return result.run.iteration_s


def _row(result: Result, *, tokens: float, alone: float, stock_s: float | None) -> ComparisonRow:
    compared, run, measured_s = result.compared, result.run, _measured_s(result)
    predicted_s = compared.predicted_s
    nothing = ComparisonRow(
        system=compared.name,
        layout=compared.layout,
        valid=run is not None and run.self_test.is_valid,
        iteration_s_median=None,
        tokens_per_s=None,
        speedup_vs_stock=None,
        efficiency_of_aggregate=None,
        predicted_iteration_s=predicted_s,
        prediction_error=None,
        final_loss=None,
    )
    if measured_s is None or run is None:
        return nothing
    return replace(
        nothing,
        iteration_s_median=measured_s,
        tokens_per_s=tokens / measured_s,
        speedup_vs_stock=None if stock_s is None else stock_s / measured_s,
        efficiency_of_aggregate=tokens / measured_s / alone,
        prediction_error=None if predicted_s is None else predicted_s / measured_s - 1,
        final_loss=run.losses[-1],
    )
