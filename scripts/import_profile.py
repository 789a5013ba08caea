"""Make a profile from CSV tables, such as those that the authors of Zorse and Sailor publish.

    python -m scripts.import_profile TABLE... --out profile.json [--origin WHO]

A table is recognised by its columns, listed below; others are ignored. Kinds of GPU and models are
recognised under their usual spellings; other models are refused.

- In tables of every layer, index 0 is the embedding and the last one the head. An entry before the
  head that takes less than a tenth of a layer (a separate final norm) counts as part of the head.
  Layers are averaged.
- --dtype and --seq-length supply these values for tables without the columns. If a memory table
  comes with them, the sequence length is the embedding's output divided by the hidden size.
- update_ms is the optimizer step of a model with as many layers as there are distinct times
  (Sailor's profiler runs few layers and copies their times).
"""

import argparse
import csv
import io
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, get_args

import pydantic
from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from zorse_megatron.cli.checked_file import profile_counts
from zorse_megatron.errors import Problem, ProfileError, ZorseError
from zorse_megatron.files.json_text import read_text
from zorse_megatron.files.strict import read_file
from zorse_megatron.gpus.gpu import Dtype
from zorse_megatron.gpus.known_gpus import canonical_kind
from zorse_megatron.inputs.model import MODELS, ModelShape, canonical_model
from zorse_megatron.inputs.profile import (
    PROFILE_FILE,
    LinkCurve,
    Part,
    PartMemory,
    Profile,
    Source,
    Times,
    UpdateTime,
    problems_of,
    save_profile,
)

# An entry between embedding and head that takes less of a layer's time than this is no layer: in
# public tables a final norm stands there on its own.
_NO_LAYER_BELOW = 0.1
# A message lists at most this many bad cells.
_MAX_PROBLEMS = 20
_TOO_MANY = "too many cells"


def _well_known(name: str) -> str:
    if canonical_model(name) not in MODELS:
        raise ValueError("a well-known model, whose shape is known")
    return name


Model = Annotated[str, AfterValidator(_well_known)]
Kind = Annotated[str, Field(min_length=1), AfterValidator(canonical_kind)]
Positive = Annotated[int, Field(ge=1, le=10**18)]
Whole = Annotated[int, Field(ge=0, le=10**18)]
Number = Annotated[float, Field(allow_inf_nan=False)]
# Of cells in milliseconds, a day at most.
Seconds = Annotated[float, Field(ge=0, le=86_400_000), AfterValidator(lambda ms: ms / 1e3)]
Forward = Annotated[Seconds, Field(validation_alias="forward_ms")]
Backward = Annotated[Seconds, Field(validation_alias="backward_ms")]


@pydantic.dataclasses.dataclass(frozen=True, kw_only=True)
class LayerRow:
    """Single layers."""

    model: Model
    gpu: Kind
    seq_length: Positive
    dtype: Dtype
    micro_batch_size: Positive
    forward_s: Forward
    backward_s: Backward


@pydantic.dataclasses.dataclass(frozen=True, kw_only=True)
class TensorParallelRow:
    """Every layer, by tensor-parallel size."""

    model: Model
    gpu: Kind
    micro_batch_size: Positive
    tensor_parallel: Positive
    layer_index: Whole
    forward_s: Forward
    backward_s: Backward
    update_s: Annotated[Seconds, Field(validation_alias="update_ms")]


@pydantic.dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryRow:
    """Memory of every layer."""

    model: Model
    tensor_parallel: Positive
    layer_index: Whole
    params_floats: Whole
    activation_floats: Whole
    output_floats: Whole


@pydantic.dataclasses.dataclass(frozen=True, kw_only=True)
class LinkRow:
    """Bandwidth curves of links, in GB/s: a x² + b x + c, x = log2(MB)."""

    link: Literal["intra-node", "inter-node"]
    gpu: Kind
    gpus_sharing: Positive
    a: Number
    b: Number
    c: Number
    max_bytes_per_s: Annotated[Number, Field(gt=0)]


TABLES = (TensorParallelRow, LayerRow, MemoryRow, LinkRow)
Row = TypeVar("Row")
Rows = Mapping[str, Sequence[Any]]
"""File -> its rows."""


@dataclass(frozen=True, kw_only=True)
class Imported:
    """A profile, and what a reader should know of how it was made."""

    profile: Profile
    notes: tuple[str, ...]


def columns_of(row: type) -> tuple[str, ...]:
    """The columns of a table, as in its header."""
    return tuple(TypeAdapter(row).json_schema()["properties"])


def read_rows(row: type[Row], data: bytes, name: str) -> list[Row]:
    """Read a table with these columns, and maybe others. Raises ProfileError."""
    adapter, rows = TypeAdapter(row), []
    reader = csv.DictReader(
        io.StringIO(read_text(data, name, PROFILE_FILE)), restkey=_TOO_MANY, skipinitialspace=True
    )
    header = ", ".join(reader.fieldnames or ())
    absent = [each for each in columns_of(row) if each not in (reader.fieldnames or ())]
    problems = [_problem(f"{name}: line 1", f"columns {header}", f"{each} too") for each in absent]
    for cells in reader if not absent else ():
        where = f"{name}: line {reader.line_num}"
        if _TOO_MANY in cells:
            problems.append(_problem(where, _TOO_MANY, f"{len(reader.fieldnames or ())}"))
            continue
        try:
            rows.append(adapter.validate_python(cells))
        except ValidationError as error:
            problems += [
                _problem(f"{where}: {each['loc'][0]}", f"{each.get('input')!r}", each["msg"])
                for each in error.errors()
            ]
    if not rows and not problems:
        problems.append(_problem(name, "a header without rows", "measurements"))
    if problems:
        raise ProfileError(f"{name} cannot be imported", problems[:_MAX_PROBLEMS])
    return rows


def import_tables(
    tables: Mapping[str, bytes],
    *,
    origin: str | None = None,
    dtype: Dtype = "float32",
    seq_length: int = 2048,
) -> Imported:
    """Return the profile that tables (name -> content) make together. Raises ProfileError.

    `origin`: who measured. `dtype`, `seq_length`: where neither the table nor that of memory says.
    """
    files: dict[type, dict[str, list[Any]]] = {row: {} for row in TABLES}
    for name, data in tables.items():
        row = _table_of(name, data)
        files[row][Path(name).name] = read_rows(row, data, name)
    parallel, layers, memory, links = (files[row] for row in TABLES)
    of_models = [
        row for each in (parallel, layers, memory) for rows in each.values() for row in rows
    ]
    shapes = {row.model: MODELS[canonical_model(row.model)] for row in of_models}
    parts = tuple(_memory(memory, shapes))
    found = {each.model: each.seq_length for each in parts}
    lengths = dict.fromkeys(shapes, seq_length) | found
    ranks = _by_ranks(parallel)
    curves, notes = _links(links)
    profile = Profile(
        schema_version=1,
        sources=tuple(Source(name=Path(n).name, kind="measured", origin=origin) for n in tables),
        models=tuple(replace(shape, name=name) for name, shape in shapes.items()),
        times=(*_layer_times(layers), *_rank_times(ranks, lengths, dtype)),
        updates=tuple(_updates(ranks, shapes, dtype)),
        memory=parts,
        links=curves,
    )
    breaches = list(problems_of(profile))
    if breaches:
        raise ProfileError("the tables do not make a profile", breaches)
    told = (f"{model}: sequence length {n}, by the memory table" for model, n in found.items())
    assumed = f"the table of layers by tensor-parallel size has no dtype: taken as {dtype}"
    return Imported(profile=profile, notes=(*told, *([assumed] if ranks else []), *notes))


def _table_of(name: str, data: bytes) -> type:
    """The table that lacks the fewest columns."""
    header = read_text(data, name, PROFILE_FILE).partition("\n")[0]
    found = {column.strip() for column in header.split(",")}
    return min(TABLES, key=lambda row: len(set(columns_of(row)) - found))


def _problem(where: str, found: str, expected: str) -> Problem:
    remedy = "python -m scripts.import_profile --help describes the tables that can be imported."
    return Problem(where=where, found=found, expected=expected, remedy=remedy)


def _layer_times(files: Rows) -> Iterator[Times]:
    """Of the tables of single layers; points that come twice become their median."""
    series: dict[_Series, dict[int, list[LayerRow]]] = defaultdict(lambda: defaultdict(list))
    for source, rows in files.items():
        for row in rows:
            key = _Series(row.model, row.gpu, row.seq_length, row.dtype, 1, source)
            series[key][row.micro_batch_size].append(row)
    for key, by_size in series.items():
        points = {
            size: (median(row.forward_s for row in same), median(row.backward_s for row in same))
            for size, same in by_size.items()
        }
        yield key.times("layer", points)


class _Series(NamedTuple):
    """What the points of an entry have in common."""

    model: str
    gpu: str
    seq_length: int
    dtype: Dtype
    tensor_parallel: int
    source: str

    def times(self, part: Part, points: Mapping[int, tuple[float, float]]) -> Times:
        """An entry. `points`: micro-batch size -> forward and backward."""
        sizes = tuple(sorted(points))
        return Times(
            part=part,
            model=self.model,
            gpu_kind=self.gpu,
            seq_length=self.seq_length,
            dtype=self.dtype,
            tensor_parallel=self.tensor_parallel,
            source=self.source,
            micro_batch_sizes=sizes,
            forward_s=tuple(points[size][0] for size in sizes),
            backward_s=tuple(points[size][1] for size in sizes),
        )


_Ranks = Mapping[tuple[str, str, int, str], Mapping[int, Mapping[int, TensorParallelRow]]]
"""Model, GPU, tensor-parallel size and file -> micro-batch size -> layer -> its row."""


def _by_ranks(files: Rows) -> _Ranks:
    found: dict[Any, dict[int, dict[int, Any]]] = defaultdict(lambda: defaultdict(dict))
    for source, rows in files.items():
        for row in rows:
            key = (row.model, row.gpu, row.tensor_parallel, source)
            found[key][row.micro_batch_size][row.layer_index] = row
    return found


def _rank_times(ranks: _Ranks, lengths: Mapping[str, int], dtype: Dtype) -> Iterator[Times]:
    """Of the tables that have every layer: means of layers, sums of embedding and head."""
    for (model, gpu, tensor_parallel, source), by_size in ranks.items():
        series = _Series(model, gpu, lengths[model], dtype, tensor_parallel, source)
        points: dict[Part, dict[int, tuple[float, float]]] = defaultdict(dict)
        for size, layers in by_size.items():
            for part, rows in _parts(layers, "forward_s").items():
                whole = fmean if part == "layer" else sum
                forward_s, backward_s = [r.forward_s for r in rows], [r.backward_s for r in rows]
                points[part][size] = whole(forward_s), whole(backward_s)
        for part, found in points.items():
            yield series.times(part, found)


def _updates(ranks: _Ranks, shapes: Mapping[str, ModelShape], dtype: Dtype) -> Iterator[UpdateTime]:
    """Parameters and duration of optimizer steps, which each row of the table repeats.

    Sailor's profiler steps a model with few layers, as all are alike, and copies their times to
    the others: there are as many layers as different times. Counted so, a parameter takes 22.5 ps
    on the A100-40 with three of four models, which is Adam's 28 bytes at 80 % of the bandwidth.
    """
    for (model, gpu, degree, source), by_size in ranks.items():
        rows = [row for layers in by_size.values() for row in layers.values()]
        steps = [row.update_s for row in rows if row.update_s > 0]
        if not steps:
            continue
        different = max(
            len({(row.forward_s, row.backward_s) for row in _parts(layers, "forward_s")["layer"]})
            for layers in by_size.values()
        )
        shape = shapes[model]
        ends = shape.embedding_parameters(degree) + shape.head_parameters(degree)
        yield UpdateTime(
            gpu_kind=gpu,
            dtype=dtype,
            num_parameters=ends + different * shape.layer_parameters(degree),
            update_s=median(steps),
            source=source,
        )


def _memory(files: Rows, shapes: Mapping[str, ModelShape]) -> Iterator[PartMemory]:
    """Of the tables of memory.

    They do not say the sequence length, but what the embedding hands on is that x hidden size.
    """
    tables: dict[tuple[str, int, str], dict[int, MemoryRow]] = defaultdict(dict)
    for source, rows in files.items():
        for row in rows:
            tables[row.model, row.tensor_parallel, source][row.layer_index] = row
    for (model, tensor_parallel, source), layers in tables.items():
        seq_length = layers[min(layers)].output_floats // shapes[model].hidden_size
        for part, rows in _parts(layers, "params_floats").items():
            whole = fmean if part == "layer" else sum
            yield PartMemory(
                part=part,
                model=model,
                seq_length=max(1, seq_length),
                tensor_parallel=tensor_parallel,
                source=source,
                parameters=round(whole([row.params_floats for row in rows])),
                activation_elements=round(whole([row.activation_floats for row in rows])),
                output_elements=rows[-1].output_floats,
            )


def _parts(layers: Mapping[int, Row], weight: str) -> dict[Part, list[Row]]:
    """Sort the rows of one model into embedding, layers and head."""
    ordered = [layers[index] for index in sorted(layers)]
    if len(ordered) < 3:  # no embedding and head around it
        return {"layer": ordered}
    weights = [getattr(row, weight) for row in ordered]
    typical, stop = median(weights[1:-1]), len(ordered) - 1
    while stop > 2 and weights[stop - 1] < _NO_LAYER_BELOW * typical:
        stop -= 1
    return {"embedding": ordered[:1], "layer": ordered[1:stop], "head": ordered[stop:]}


def _links(files: Rows) -> tuple[tuple[LinkCurve, ...], list[str]]:
    """The curves, of several of a link the first one; and what is to be said of that."""
    curves: dict[tuple[str, str, int], LinkCurve] = {}
    notes = []
    for source, rows in files.items():
        for row in rows:
            curve = LinkCurve(
                link=row.link,
                gpu_kind=row.gpu,
                gpus_sharing=row.gpus_sharing,
                quadratic=row.a,
                linear=row.b,
                constant=row.c,
                max_bytes_per_s=row.max_bytes_per_s,
                source=source,
            )
            key = (row.link, row.gpu, row.gpus_sharing)
            if curves.setdefault(key, curve) != curve:
                notes.append(f"link {' '.join(map(str, key))}: several rows; the first one counts")
    return tuple(curves.values()), notes


def main() -> int:
    """Import the tables of the command line."""
    columns = "\n".join(f"- {row.__doc__}\n  {', '.join(columns_of(row))}" for row in TABLES)
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=f"Columns:\n{columns}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("tables", metavar="TABLE", type=Path, nargs="+")
    parser.add_argument("--out", metavar="PROFILE", type=Path, required=True)
    parser.add_argument("--origin", help="who measured, for the record")
    parser.add_argument("--dtype", choices=get_args(Dtype), default="float32")
    parser.add_argument("--seq-length", type=int, default=2048)
    arguments = parser.parse_args()
    try:
        found = import_tables(
            {str(path): read_file(path, PROFILE_FILE) for path in arguments.tables},
            origin=arguments.origin,
            dtype=arguments.dtype,
            seq_length=arguments.seq_length,
        )
        save_profile(found.profile, arguments.out)
    except ZorseError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{arguments.out}: {profile_counts(found.profile)}")
    for note in found.notes:
        print(f"note: {note}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
