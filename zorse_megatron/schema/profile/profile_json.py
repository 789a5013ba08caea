"""Profile files: strict loading, canonical saving, joining."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from zorse_megatron.errors import Problem, ProfileError
from zorse_megatron.files.write import write_text
from zorse_megatron.schema.profile.profile import Profile, ProfiledModel, Source, Times, Transfers
from zorse_megatron.schema.text.file_kind import FileKind
from zorse_megatron.schema.text.json_text import layout, read_json
from zorse_megatron.schema.text.strict import built, check_version, plain, read_file
from zorse_megatron.schema.text.suggest import did_you_mean

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
    models: dict[ProfiledModel, None] = {}
    for profile in profiles:
        sources |= dict.fromkeys(profile.sources)
        models |= dict.fromkeys(profile.models)
    result = Profile(
        schema_version=1,
        sources=tuple(sources),
        models=tuple(models),
        times=tuple(entry for profile in profiles for entry in profile.times),
        updates=tuple(entry for profile in profiles for entry in profile.updates),
        memory=tuple(entry for profile in profiles for entry in profile.memory),
        links=tuple(entry for profile in profiles for entry in profile.links),
        transfers=tuple(entry for profile in profiles for entry in profile.transfers),
        unequal_shards=tuple(entry for profile in profiles for entry in profile.unequal_shards),
        processes=tuple(entry for profile in profiles for entry in profile.processes),
    )
    problems = list(problems_of(result))
    if problems:
        raise ProfileError("the profiles do not go together", problems)
    return result


def problems_of(profile: Profile) -> Iterator[Problem]:
    """Yield every breach of the rules that tie values together."""
    yield from _repeated((source.name for source in profile.sources), "sources", "source")
    yield from _repeated((model.name for model in profile.models), "models", "model")
    yield from _references(profile)
    yield from _model_fits(profile)
    for index, times in enumerate(profile.times):
        yield from _columns(times, f"times[{index}]")
    for index, transfers in enumerate(profile.transfers):
        yield from _message_columns(transfers, f"transfers[{index}]")
    yield from _one_entry_each(profile)


def _repeated(names: Iterable[str], where: str, noun: str) -> Iterator[Problem]:
    for name, count in Counter(names).items():
        if count > 1:
            yield Problem(
                where=where,
                found=f'{count} entries with the name "{name}"',
                expected=f"a different name for every {noun}",
                remedy="Rename one, and the entries that refer to it.",
            )


def _references(profile: Profile) -> Iterator[Problem]:
    known = {
        "source": {source.name for source in profile.sources},
        "model": {model.name for model in profile.models},
    }
    entries = ("times", "updates", "memory", "links", "transfers", "unequal_shards", "processes")
    for section in entries:
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


def _columns(times: Times, where: str) -> Iterator[Problem]:
    sizes = times.micro_batch_sizes
    if any(first >= second for first, second in pairwise(sizes)):
        yield Problem(
            where=f"{where}.micro_batch_sizes",
            found=str(list(sizes)),
            expected="each size once, ascending",
            remedy="Sort the columns by micro-batch size; join points of the same size.",
        )
    for key in ("forward_s", "backward_s"):
        if len(getattr(times, key)) != len(sizes):
            yield Problem(
                where=f"{where}.{key}",
                found=f"{len(getattr(times, key))} times",
                expected=f"{len(sizes)}, one for each of micro_batch_sizes",
                remedy="Give the three lists the same length.",
            )
    if times.part == "layer" and 0.0 in times.forward_s:
        yield Problem(
            where=f"{where}.forward_s",
            found="a layer that takes no time",
            expected="times above 0",
            remedy="Measure again with a finer clock; times are in seconds.",
        )


def _message_columns(transfers: Transfers, where: str) -> Iterator[Problem]:
    sizes = transfers.num_bytes
    if any(first >= second for first, second in pairwise(sizes)):
        yield Problem(
            where=f"{where}.num_bytes",
            found=str(list(sizes)),
            expected="each size once, ascending",
            remedy="Sort the columns by size.",
        )
    if len(transfers.time_s) != len(sizes):
        yield Problem(
            where=f"{where}.time_s",
            found=f"{len(transfers.time_s)} times",
            expected=f"{len(sizes)}, one for each of num_bytes",
            remedy="Give both lists the same length.",
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
