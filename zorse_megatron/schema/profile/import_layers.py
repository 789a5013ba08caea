"""Rows of layer tables into entries of a profile."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from statistics import fmean, median
from typing import Any

from zorse_megatron.schema.gpus.gpu import Dtype
from zorse_megatron.schema.model.model_shape import ModelShape
from zorse_megatron.schema.profile.profile import Part, PartMemory, Times, UpdateTime

Row = dict[str, Any]
Key = tuple[Any, ...]

# An entry between embedding and head that takes less of a layer's time than this is no layer: in
# public tables a final norm stands there on its own.
_NO_LAYER_BELOW = 0.1


def layer_times(rows: Iterable[Row]) -> tuple[Times, ...]:
    """Make the entries of a table of single layers; points that come twice become their median."""
    points: dict[Key, dict[int, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        key = (row["model"], row["gpu"], row["seq_length"], row["dtype"], row["source"])
        points[key][row["micro_batch_size"]].append(row)
    entries = []
    for (model, gpu, seq_length, dtype, source), by_size in points.items():
        columns = {
            size: (
                median(row["forward_ms"] for row in same),
                median(r["backward_ms"] for r in same),
            )
            for size, same in by_size.items()
        }
        entries.append(_times("layer", model, gpu, seq_length, dtype, 1, source, columns))
    return tuple(entries)


def tensor_parallel_times(
    rows: Iterable[Row],
    *,
    dtype: Dtype,
    seq_lengths: Mapping[str, int],
    shapes: Mapping[str, ModelShape],
    notes: list[str],
) -> tuple[tuple[Times, ...], tuple[UpdateTime, ...]]:
    """Make the entries of a table that has every layer."""
    tables: dict[Key, dict[int, dict[int, Row]]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        key = (row["model"], row["gpu"], row["tensor_parallel"], row["source"])
        tables[key][row["micro_batch_size"]][row["layer_index"]] = row
    times: list[Times] = []
    updates: list[UpdateTime] = []
    for (model, gpu, tensor_parallel, source), by_size in tables.items():
        at = (model, gpu, seq_lengths[model], dtype, tensor_parallel, source)
        times += [_times(part, *at, points) for part, points in _columns(by_size).items()]
        step = _step(by_size, shapes[model], tensor_parallel)
        if step is not None:
            updates.append(
                UpdateTime(
                    gpu_kind=gpu,
                    dtype=dtype,
                    num_parameters=step[0],
                    update_s=step[1],
                    source=source,
                )
            )
    if times:
        notes.append(
            "the table of layers by tensor-parallel size has no dtype: taken as "
            f"{dtype}; change it with --dtype"
        )
    return tuple(times), tuple(updates)


def _columns(
    by_size: Mapping[int, Mapping[int, Row]],
) -> dict[Part, dict[int, tuple[float, float]]]:
    """Return forward and backward time of each part by micro-batch size."""
    columns: dict[Part, dict[int, tuple[float, float]]] = defaultdict(dict)
    for size, layers in by_size.items():
        for part, members in _parts(layers, "forward_ms").items():
            whole = fmean if part == "layer" else sum
            columns[part][size] = (
                whole([row["forward_ms"] for row in members]),
                whole([row["backward_ms"] for row in members]),
            )
    return columns


def memory_entries(
    rows: Iterable[Row], shapes: Mapping[str, ModelShape], notes: list[str]
) -> tuple[tuple[PartMemory, ...], dict[str, int]]:
    """Make the memory entries, and return the sequence length of each model in the table.

    The table does not say it, but what the embedding hands on is sequence length x hidden size.
    """
    tables: dict[Key, dict[int, Row]] = defaultdict(dict)
    for row in rows:
        tables[row["model"], row["tensor_parallel"], row["source"]][row["layer_index"]] = row
    entries, sequences = [], {}
    for (model, tensor_parallel, source), layers in tables.items():
        seq_length = layers[min(layers)]["output_floats"] // shapes[model].hidden_size
        sequences[model] = max(1, seq_length)
        for part, members in _parts(layers, "params_floats").items():
            whole = fmean if part == "layer" else sum
            entries.append(
                PartMemory(
                    part=part,
                    model=model,
                    seq_length=sequences[model],
                    tensor_parallel=tensor_parallel,
                    source=source,
                    parameters=round(whole([row["params_floats"] for row in members])),
                    activation_elements=round(whole([r["activation_floats"] for r in members])),
                    output_elements=members[-1]["output_floats"],
                )
            )
    notes += [
        f"{model}: sequence length {length}, by what its embedding hands on in the memory table"
        for model, length in sequences.items()
    ]
    return tuple(entries), sequences


def _parts(layers: Mapping[int, Row], weight: str) -> dict[Part, list[Row]]:
    """Sort the rows of one model into embedding, layers and head."""
    ordered = [layers[index] for index in sorted(layers)]
    if len(ordered) < 3:  # no embedding and head around it
        return {"layer": ordered}
    typical = median(row[weight] for row in ordered[1:-1])
    stop = len(ordered) - 1
    while stop > 2 and ordered[stop - 1][weight] < _NO_LAYER_BELOW * typical:
        stop -= 1
    return {"embedding": ordered[:1], "layer": ordered[1:stop], "head": ordered[stop:]}


def _step(
    by_size: Mapping[int, Mapping[int, Row]], shape: ModelShape, tensor_parallel: int
) -> tuple[int, float] | None:
    """Return parameters and duration of the optimizer step, which each row of the table repeats.

    Sailor's profiler steps a model with few layers, as all are alike, and copies their times to
    the others: there are as many layers as different times. Counted so, a parameter takes 22.5 ps
    on the A100-40 with three of four models, which is Adam's 28 bytes at 80 % of the bandwidth.
    """
    steps, different = [], 1
    for layers in by_size.values():
        parts = _parts(layers, "forward_ms")
        steps += [row["update_ms"] for row in layers.values() if row["update_ms"] > 0]
        times = {(row["forward_ms"], row["backward_ms"]) for row in parts["layer"]}
        different = max(different, len(times))
    if not steps:
        return None
    ends = shape.embedding_parameters(tensor_parallel) + shape.head_parameters(tensor_parallel)
    return ends + different * shape.layer_parameters(tensor_parallel), median(steps)


def _times(  # noqa: PLR0917
    part: Part,
    model: str,
    gpu: str,
    seq_length: int,
    dtype: Dtype,
    tensor_parallel: int,
    source: str,
    points: Mapping[int, tuple[float, float]],
) -> Times:
    sizes = tuple(sorted(points))
    return Times(
        part=part,
        model=model,
        gpu_kind=gpu,
        seq_length=seq_length,
        dtype=dtype,
        tensor_parallel=tensor_parallel,
        source=source,
        micro_batch_sizes=sizes,
        forward_s=tuple(points[size][0] for size in sizes),
        backward_s=tuple(points[size][1] for size in sizes),
    )
