"""The profile, and its file: what was measured on which kind of GPU, and by whom.

Times are of one micro-batch through one part of the model. Every entry names its source, so that a
prediction can say what it rests on. Reading and writing the file is in `profile.py`.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass

from zorse_megatron.errors import Problem, ProfileError
from zorse_megatron.files.json_text import layout, read_json
from zorse_megatron.files.read_write import write_text
from zorse_megatron.files.strict import FileKind, built, check_version, plain, read_file
from zorse_megatron.files.wording import did_you_mean, repeated
from zorse_megatron.gpus.gpu import Attention, Dtype
from zorse_megatron.inputs.model import ModelShape
from zorse_megatron.plan.plan import Count, FiniteFloat, Positive, PositiveFloat, refuse_non_integer

_CONFIG = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)

Text = Annotated[str, Field(min_length=1)]
# A layer that takes longer than a day for one micro-batch was not measured.
Duration = Annotated[float, Field(ge=0, le=86400, allow_inf_nan=False)]
Part = Literal["layer", "embedding", "head"]
Sharded = Literal["all_gather", "reduce_scatter"]
TimedOperation = Literal[
    "send",
    "all_gather",
    "all_gather_unequal",
    "reduce_scatter",
    "reduce_scatter_unequal",
    "all_reduce",
]


def unequal_parts(num_ranks: int) -> tuple[int, ...]:
    """Return the parts that ranks own in what is timed over unequal shards: 3 and 1 by turns."""
    return ((3, 1) * num_ranks)[:num_ranks]


@dataclass(frozen=True, kw_only=True, config=_CONFIG)
class Source:
    """Who found the figures, and how."""

    name: Text
    """What entries refer to; the name of the file, if one was imported."""
    kind: Literal["measured", "analytic"]
    """measured: a clock ran; analytic: computed from published figures."""
    origin: str | None = None
    """Publication, data set and licence, or the command that measured."""


@dataclass(frozen=True, kw_only=True, config=_CONFIG)
class Times:
    """Forward and backward time of one part, by micro-batch size; the lists go together."""

    part: Part
    """layer: one transformer layer; embedding; head: final norm, output layer and loss."""
    model: Text
    """A name in models."""
    gpu_kind: Text
    """On which kind of GPU."""
    seq_length: Positive
    """Tokens per sample."""
    dtype: Dtype
    """What was computed in."""
    tensor_parallel: Positive = 1
    """Ranks that split the part."""
    source: Text
    """A name in sources."""
    micro_batch_sizes: Annotated[tuple[Positive, ...], Field(min_length=1)]
    """Ascending."""
    forward_s: Annotated[tuple[Duration, ...], Field(min_length=1)]
    """One for each micro-batch size."""
    backward_s: Annotated[tuple[Duration, ...], Field(min_length=1)]
    """One for each micro-batch size."""
    weight_gradients_s: Annotated[tuple[Duration, ...] | None, Field(min_length=1)] = None
    """Of the backward, what gradients of a layer's matrices take where they are computed apart from
    it; one for each micro-batch size. null: not measured."""
    attention: Attention | None = None
    """What core attention ran; null: it is not known."""


@dataclass(frozen=True, kw_only=True, config=_CONFIG)
class UpdateTime:
    """Duration of one optimizer step."""

    gpu_kind: Text
    """On which kind of GPU."""
    dtype: Dtype
    """What the model was trained in."""
    num_parameters: Positive
    """That the step updated, on one GPU."""
    update_s: PositiveFloat
    """How long it took."""
    source: Text
    """A name in sources."""


@dataclass(frozen=True, kw_only=True, config=_CONFIG)
class PartMemory:
    """Elements that one part has on each rank, for one sample."""

    part: Part
    """layer, embedding or head."""
    model: Text
    """A name in models."""
    seq_length: Positive
    """Tokens per sample."""
    tensor_parallel: Positive = 1
    """Ranks that split the part."""
    source: Text
    """A name in sources."""
    parameters: Count
    """On each rank."""
    activation_elements: Count
    """Kept from forward to backward."""
    output_elements: Count
    """Handed to the next part."""
    gpu_kind: Text | None = None
    """On which kind of GPU; null: it counts for all kinds."""
    attention: Attention | None = None
    """What core attention ran; null: what its kind runs, or without a kind what each kind runs."""


@dataclass(frozen=True, kw_only=True, config=_CONFIG)
class ProcessMemory:
    """What a process has on its GPU beside torch's allocator."""

    gpu_kind: Text
    """On which kind of GPU."""
    context_bytes: Count
    """CUDA context and loaded kernels, without communicators."""
    source: Text
    """A name in sources."""


@dataclass(frozen=True, kw_only=True, config=_CONFIG)
class LinkCurve:
    """Bandwidth of a link by message size.

    GB/s = quadratic x^2 + linear x + constant with x = log2(MB), the form in which Sailor (SOSP
    2025) publishes its links; MB and GB are 10^6 and 10^9 bytes.
    """

    link: Literal["intra-node", "inter-node"]
    """Between GPUs of one node, or between nodes."""
    gpu_kind: Text
    """The kind of GPU of the node."""
    gpus_sharing: Positive
    """GPUs that used the link at once."""
    quadratic: FiniteFloat
    """Coefficient of x^2."""
    linear: FiniteFloat
    """Coefficient of x."""
    constant: FiniteFloat
    """At 1 MB."""
    max_bytes_per_s: PositiveFloat
    """What no message exceeds."""
    source: Text
    """A name in sources."""


@dataclass(frozen=True, kw_only=True, config=_CONFIG)
class UnequalShards:
    """How much longer a collective takes over unequal shards than their bytes tell."""

    operation: Sharded
    """The collective."""
    link: Literal["intra-node", "inter-node"]
    """Among GPUs of one node, or of two nodes."""
    gpu_kinds: Annotated[tuple[Text, ...], Field(min_length=1)]
    """Kinds of the GPUs that took part, each once, sorted."""
    factor: PositiveFloat
    """On the time that the largest shard or the whole buffer takes around a ring."""
    source: Text
    """A name in sources."""


@dataclass(frozen=True, kw_only=True, config=_CONFIG)
class Transfers:
    """Times of messages by size, as measured; the lists go together.

    A record of what `zorse discover` found: latencies and bandwidths of the cluster file, and
    `links` and `unequal_shards`, were fitted to it. No cost rests on it.
    """

    operation: TimedOperation
    """send: from one GPU to another one; the others among all that took part.

    Those that are called unequal over shards of 3 and 1 parts by turns, the others over equal ones.
    """
    nodes: Annotated[tuple[Text, ...], Field(min_length=1, max_length=2)]
    """Kinds of the nodes: one for inside a node, two for between nodes."""
    gpu_kinds: Annotated[tuple[Text, ...], Field(min_length=2)]
    """Kinds of the GPUs that took part, one each."""
    source: Text
    """A name in sources."""
    num_bytes: Annotated[tuple[Positive, ...], Field(min_length=1)]
    """Ascending: of the message, or of what each GPU has in the end."""
    time_s: Annotated[tuple[Duration, ...], Field(min_length=1)]
    """One for each number of bytes; of a send one way."""

    @property
    def key(self) -> tuple[object, ...]:
        """What it is about; a profile has it once."""
        return (self.operation, self.nodes, self.gpu_kinds)


@dataclass(frozen=True, kw_only=True, config=_CONFIG)
class Profile:
    """All that is known of some models on some kinds of GPU."""

    schema_version: Annotated[Literal[1], BeforeValidator(refuse_non_integer)]
    """Version of the profile file format."""
    sources: Annotated[tuple[Source, ...], Field(min_length=1)]
    """Who found the figures."""
    models: tuple[ModelShape, ...] = ()
    """Models that have entries."""
    times: tuple[Times, ...] = ()
    """Forward and backward times."""
    updates: tuple[UpdateTime, ...] = ()
    """Optimizer steps."""
    memory: tuple[PartMemory, ...] = ()
    """Memory of parts."""
    links: tuple[LinkCurve, ...] = ()
    """Links."""
    transfers: tuple[Transfers, ...] = ()
    """Times of messages, as measured."""
    unequal_shards: tuple[UnequalShards, ...] = ()
    """What unequal shards cost."""
    processes: tuple[ProcessMemory, ...] = ()
    """Memory beside tensors."""

    def gpu_kinds(self) -> tuple[str, ...]:
        """Return the kinds that have times, in order of appearance."""
        return tuple(dict.fromkeys(entry.gpu_kind for entry in self.times))

    def model_named(self, name: str) -> ModelShape:
        """Return the model that entries call `name`."""
        return next(model for model in self.models if model.name == name)


_SECTIONS = ("times", "updates", "memory", "links", "transfers", "unequal_shards", "processes")
"""What has entries with sources."""


# Profile files: strict loading, canonical saving, joining.


PROFILE_VERSION = 1
PROFILE_FILE = FileKind(
    name="profile",
    syntax="JSON",
    document="docs/profile-file.md",
    error=ProfileError,
    root=Profile,
)


def load_profile(path: str | Path) -> Profile:
    """Read, check and return the profile in a file. Raises ProfileError with every problem."""
    return parse_profile(read_file(path, PROFILE_FILE), source=str(path))


def parse_profile(data: bytes, *, source: str = "profile") -> Profile:
    """Check and return the profile in `data`; Problems call it `source`. Raises ProfileError."""
    value, problems = read_json(data, source, PROFILE_FILE)
    check_version(value, source, PROFILE_FILE, PROFILE_VERSION)
    profile: Profile = built(value, problems, PROFILE_FILE, source, rules=problems_of)
    return profile


def dump_profile(profile: Profile) -> str:
    """Return the canonical text of a profile."""
    return layout(plain(profile)) + "\n"


def save_profile(profile: Profile, path: str | Path) -> None:
    """Write a profile to a file.

    Raises ProfileError for one that would not load again, NotWritten for a path that takes no file.
    """
    problems = list(problems_of(profile))
    if problems:
        raise ProfileError(f"the profile for {path} cannot be used", problems)
    write_text(path, dump_profile(profile))


def joined(profiles: Sequence[Profile]) -> Profile:
    """Return one profile with the entries of several; equal sources and models become one.

    Raises ProfileError where the result would contradict itself.
    """
    sources: dict[Source, None] = {}
    models: dict[ModelShape, None] = {}
    for profile in profiles:
        sources |= dict.fromkeys(profile.sources)
        models |= dict.fromkeys(profile.models)
    result = Profile(
        schema_version=1,
        sources=tuple(sources),
        models=tuple(models),
        **{
            name: tuple(entry for profile in profiles for entry in getattr(profile, name))
            for name in _SECTIONS
        },
    )
    problems = list(problems_of(result))
    if problems:
        raise ProfileError("the profiles do not go together", problems)
    return result


def problems_of(profile: Profile) -> Iterator[Problem]:
    """Yield every breach of the rules that tie values together."""
    remedy = "Rename one, and the entries that refer to it."
    for noun, named in (("source", profile.sources), ("model", profile.models)):
        yield from repeated((each.name for each in named), f"{noun}s", noun, remedy)
    yield from _references(profile)
    yield from _model_fits(profile)
    for index, times in enumerate(profile.times):
        yield from _columns(times, f"times[{index}]")
    for index, transfers in enumerate(profile.transfers):
        size, alike = "Sort the columns by size.", "Give both lists the same length."
        where = f"transfers[{index}]"
        yield from _lists(transfers, where, "num_bytes", ("time_s",), remedies=(size, alike))
    yield from _one_entry_each(profile)


def _references(profile: Profile) -> Iterator[Problem]:
    known = {
        "source": {source.name for source in profile.sources},
        "model": {model.name for model in profile.models},
    }
    for section in _SECTIONS:
        for index, entry in enumerate(getattr(profile, section)):
            for key, names in known.items():
                name = getattr(entry, key, None)
                if name is not None and name not in names:
                    yield Problem(
                        where=f"{section}[{index}].{key}",
                        found=f'"{name}", which is not in {key}s',
                        expected=f"the name of an entry of {key}s",
                        remedy=did_you_mean(name, names),
                    )


def _model_fits(profile: Profile) -> Iterator[Problem]:
    for index, model in enumerate(profile.models):
        if model.num_attention_heads % model.num_query_groups:
            yield Problem(
                where=f"models[{index}].num_query_groups",
                found=f"{model.num_query_groups} with {model.num_attention_heads} query heads",
                expected="a divisor of num_attention_heads",
                remedy="Every key head serves the same number of query heads.",
            )


def _lists(
    entry: Times | Transfers,
    where: str,
    sizes: str,
    columns: Sequence[str],
    *,
    remedies: tuple[str, str],
) -> Iterator[Problem]:
    """Sizes ascend, and each column has a time for each. `remedies`: for either."""
    known: tuple[int, ...] = getattr(entry, sizes)
    if any(first >= second for first, second in pairwise(known)):
        yield Problem(
            where=f"{where}.{sizes}",
            found=str(list(known)),
            expected="each size once, ascending",
            remedy=remedies[0],
        )
    for key in columns:
        column = getattr(entry, key)
        if column is not None and len(column) != len(known):
            yield Problem(
                where=f"{where}.{key}",
                found=f"{len(column)} times",
                expected=f"{len(known)}, one for each of {sizes}",
                remedy=remedies[1],
            )


def _columns(times: Times, where: str) -> Iterator[Problem]:
    sizes = times.micro_batch_sizes
    remedies = (
        "Sort the columns by micro-batch size; join points of the same size.",
        "Give these lists the same length.",
    )
    columns = ("forward_s", "backward_s", "weight_gradients_s")
    yield from _lists(times, where, "micro_batch_sizes", columns, remedies=remedies)
    weights_s = times.weight_gradients_s
    if weights_s is not None and times.part != "layer":
        yield Problem(
            where=f"{where}.weight_gradients_s",
            found=f"weight gradients apart from backwards in part {times.part}",
            expected="part layer: those of embedding and head are computed in backwards",
            remedy="Leave the list out.",
        )
    for size, weight_s, backward_s in zip(sizes, weights_s or (), times.backward_s, strict=False):
        if weight_s >= backward_s:
            yield Problem(
                where=f"{where}.weight_gradients_s",
                found=f"{weight_s:g} s of a backward of {backward_s:g} s, micro-batch size {size}",
                expected="a part of the backward",
                remedy="Measure again; backward_s is a whole backward, weight gradients included.",
            )
    if times.part == "layer" and 0.0 in times.forward_s:
        yield Problem(
            where=f"{where}.forward_s",
            found="a layer that takes no time",
            expected="times above 0",
            remedy="Measure again with a finer clock; times are in seconds.",
        )


def _one_entry_each(profile: Profile) -> Iterator[Problem]:
    seen: dict[tuple[object, ...], int] = {}
    for index, times in enumerate(profile.times):
        key = (times.part, times.model, times.gpu_kind, times.seq_length, times.dtype)
        first = seen.setdefault((*key, times.tensor_parallel), index)
        if first != index:
            yield Problem(
                where=f"times[{index}]",
                found=f"a second entry for what times[{first}] is about",
                expected="one entry for each part, model, GPU kind, sequence length, dtype and "
                "tensor-parallel size",
                remedy="Join the two, or remove one.",
            )
