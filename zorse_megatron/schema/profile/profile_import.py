"""Making a profile from CSV tables of measurements.

Four tables are known by their columns; docs/profile-file.md describes them:
- times of one transformer layer by model, GPU, sequence length, dtype and micro-batch size;
- times of every layer (0 is the embedding, the last one the head) by tensor-parallel size;
- parameters and activations of every layer by tensor-parallel size;
- bandwidth curves of links.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import get_args

from zorse_megatron.errors import Problem, ProfileError
from zorse_megatron.schema.gpus.gpu import Dtype
from zorse_megatron.schema.gpus.gpu_presets import canonical_kind
from zorse_megatron.schema.model.model_presets import MODELS, canonical_model
from zorse_megatron.schema.model.model_shape import ModelShape
from zorse_megatron.schema.profile.import_layers import (
    layer_times,
    memory_entries,
    tensor_parallel_times,
)
from zorse_megatron.schema.profile.profile import LinkCurve, Profile, ProfiledModel, Source
from zorse_megatron.schema.profile.profile_json import PROFILE_FILE, problems_of
from zorse_megatron.schema.text.csv_table import (
    COUNT,
    MILLISECONDS,
    NUMBER,
    POSITIVE,
    TEXT,
    Column,
    Row,
    header_of,
    read_table,
)
from zorse_megatron.schema.text.json_text import read_text
from zorse_megatron.schema.text.suggest import did_you_mean

LAYER_TABLE = {
    "model": TEXT,
    "gpu": TEXT,
    "seq_length": POSITIVE,
    "dtype": TEXT,
    "micro_batch_size": POSITIVE,
    "forward_ms": MILLISECONDS,
    "backward_ms": MILLISECONDS,
}
TENSOR_PARALLEL_TABLE = {
    "model": TEXT,
    "gpu": TEXT,
    "micro_batch_size": POSITIVE,
    "tensor_parallel": POSITIVE,
    "layer_index": COUNT,
    "forward_ms": MILLISECONDS,
    "backward_ms": MILLISECONDS,
    "update_ms": MILLISECONDS,
}
MEMORY_TABLE = {
    "model": TEXT,
    "tensor_parallel": POSITIVE,
    "layer_index": COUNT,
    "params_floats": COUNT,
    "activation_floats": COUNT,
    "output_floats": COUNT,
}
LINK_TABLE = {
    "link": TEXT,
    "gpu": TEXT,
    "gpus_sharing": POSITIVE,
    "a": NUMBER,
    "b": NUMBER,
    "c": NUMBER,
    "max_bytes_per_s": NUMBER,
}
_TABLES: tuple[Mapping[str, Column], ...] = (
    TENSOR_PARALLEL_TABLE,
    LAYER_TABLE,
    MEMORY_TABLE,
    LINK_TABLE,
)


@dataclass(frozen=True, kw_only=True)
class MeasurementTable:
    """One CSV file to import."""

    name: str
    data: bytes


@dataclass(frozen=True, kw_only=True)
class ImportSettings:
    """What the tables do not say."""

    origin: str | None = None
    """Who measured, for the profile's sources."""
    dtype: Dtype = "float32"
    """For tables without a dtype column."""
    seq_length: int = 2048
    """For tables without a seq_length column, if the memory table does not tell it either."""
    models: Mapping[str, ModelShape] = field(default_factory=dict)
    """Shapes by the name that the tables use, beside the well-known ones."""


@dataclass(frozen=True, kw_only=True)
class Imported:
    """A profile, and what the user should know of how it was made."""

    profile: Profile
    notes: tuple[str, ...]


def import_tables(tables: Sequence[MeasurementTable], settings: ImportSettings) -> Imported:
    """Return the profile that the tables make together. Raises ProfileError with every problem."""
    rows_of: dict[int, list[Row]] = {}
    sources = []
    for table in tables:
        number, rows = _read(table)
        name = PurePath(table.name).name
        sources.append(Source(name=name, kind="measured", origin=settings.origin))
        for row in rows:
            if "gpu" in row:
                row["gpu"] = canonical_kind(row["gpu"])
            row["source"] = name
        rows_of.setdefault(number, []).extend(rows)
    return _imported(rows_of, tuple(sources), settings)


def _read(table: MeasurementTable) -> tuple[int, list[Row]]:
    text = read_text(table.data, table.name, PROFILE_FILE)
    header = set(header_of(text))
    for number, columns in enumerate(_TABLES):
        if set(columns) <= header:
            return number, read_table(text, columns, table.name)
    closest = max(_TABLES, key=lambda columns: len(header & set(columns)))
    absent = [name for name in closest if name not in header]
    problem = Problem(
        where=f"{table.name}: line 1",
        found=f"columns {', '.join(sorted(header)) or 'none'}",
        expected=f"all columns of one table; the closest one also has {', '.join(absent)}",
        remedy="docs/profile-file.md describes the tables that can be imported.",
    )
    raise ProfileError(f"{table.name} cannot be imported", [problem])


def _imported(
    rows_of: Mapping[int, list[Row]], sources: tuple[Source, ...], settings: ImportSettings
) -> Imported:
    parallel, layers, memory, links = (rows_of.get(number, []) for number in range(4))
    rows = [*parallel, *layers, *memory]
    problems = [*_dtype_problems(layers), *_link_problems(links)]
    shapes, model_problems = _shapes((row["model"] for row in rows), settings)
    problems += model_problems
    if problems:
        raise ProfileError("the tables cannot be imported", problems)
    notes: list[str] = []
    parts, sequences = memory_entries(memory, shapes, notes)
    times, updates = tensor_parallel_times(
        parallel,
        dtype=settings.dtype,
        seq_lengths={name: sequences.get(name, settings.seq_length) for name in shapes},
        shapes=shapes,
        notes=notes,
    )
    profile = Profile(
        schema_version=1,
        sources=sources,
        models=tuple(
            ProfiledModel(**{**vars(shape), "name": name}) for name, shape in shapes.items()
        ),
        times=(*layer_times(layers), *times),
        updates=updates,
        memory=parts,
        links=_links(links, notes),
    )
    breaches = list(problems_of(profile))
    if breaches:
        raise ProfileError("the tables do not make a profile", breaches)
    return Imported(profile=profile, notes=tuple(dict.fromkeys(notes)))


def _dtype_problems(rows: Iterable[Row]) -> list[Problem]:
    unknown = sorted({row["dtype"] for row in rows} - set(get_args(Dtype)))
    return [
        Problem(
            where="column dtype",
            found=f'"{dtype}"',
            expected=f"one of {', '.join(get_args(Dtype))}",
            remedy=did_you_mean(dtype, get_args(Dtype)),
        )
        for dtype in unknown
    ]


def _link_problems(rows: Iterable[Row]) -> list[Problem]:
    kinds = ("intra-node", "inter-node")
    unknown = sorted({row["link"] for row in rows} - set(kinds))
    problems = [
        Problem(
            where="column link",
            found=f'"{link}"',
            expected=" or ".join(kinds),
            remedy=did_you_mean(link, kinds),
        )
        for link in unknown
    ]
    if any(row["max_bytes_per_s"] <= 0 for row in rows):
        problems.append(
            Problem(
                where="column max_bytes_per_s",
                found="a bandwidth of 0 or less",
                expected="bandwidths above 0",
                remedy="Remove the row: a link that carries nothing is no link.",
            )
        )
    return problems


def _shapes(
    names: Iterable[str], settings: ImportSettings
) -> tuple[dict[str, ModelShape], list[Problem]]:
    """Return the shape of every model that the tables name."""
    shapes: dict[str, ModelShape] = {}
    problems = []
    for name in dict.fromkeys(names):
        shape = settings.models.get(name) or MODELS.get(canonical_model(name))
        if shape is not None:
            shapes[name] = shape
            continue
        problems.append(
            Problem(
                where="column model",
                found=f'"{name}", whose shape is not known',
                expected="a well-known model, or a shape for it",
                remedy=f'Describe it in a YAML file with "name: {name}" and give it with --model.',
            )
        )
    return shapes, problems


def _links(rows: Iterable[Row], notes: list[str]) -> tuple[LinkCurve, ...]:
    curves: dict[tuple[str, str, int], LinkCurve] = {}
    for row in rows:
        key = (row["link"], row["gpu"], row["gpus_sharing"])
        curve = LinkCurve(
            link=row["link"],
            gpu_kind=row["gpu"],
            gpus_sharing=row["gpus_sharing"],
            quadratic=row["a"],
            linear=row["b"],
            constant=row["c"],
            max_bytes_per_s=row["max_bytes_per_s"],
            source=row["source"],
        )
        if curves.setdefault(key, curve) != curve:
            notes.append(f"link {' '.join(map(str, key))}: several rows; the first one counts")
    return tuple(curves.values())
