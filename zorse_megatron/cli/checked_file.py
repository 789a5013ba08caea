"""One file that `zorse check` validates: of which kind it is, and what is in it."""

import dataclasses
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from zorse_megatron.cli.simulated import plan_line, plan_table
from zorse_megatron.cli.workload import Workload, model_in, named_model
from zorse_megatron.costs.measured_curves import fit_curve, unlikely_times
from zorse_megatron.errors import ZorseError
from zorse_megatron.files.strict import FileKind, plain, read_file
from zorse_megatron.files.wording import number_of
from zorse_megatron.flags.torch_builds import build_notes
from zorse_megatron.gpus.known_gpus import GPU_KINDS
from zorse_megatron.inputs.cluster import Cluster
from zorse_megatron.inputs.cluster_yaml import CLUSTER_FILE, parse_cluster
from zorse_megatron.inputs.hugging_face import CONFIG_FILE, config_path
from zorse_megatron.inputs.profile import PROFILE_FILE, Profile, Times, parse_profile
from zorse_megatron.plan.plan import Plan
from zorse_megatron.plan.plan_file import PLAN_FILE, fingerprint, parse_plan
from zorse_megatron.schedule.lower import refuse_unsupported

Content = Plan | Cluster | Workload | Profile

# Of equally likely kinds the first one is taken.
_KINDS = (PLAN_FILE, CLUSTER_FILE, CONFIG_FILE, PROFILE_FILE)
_ANY_KIND = "a plan, cluster, model or profile"
_OF_HUGGING_FACE = "config.json"
_OF_MODELS = ("architectures", "hidden_size")
_PARSERS: dict[str, Callable[..., Content]] = {
    "plan": parse_plan,
    "cluster": parse_cluster,
    "model": model_in,
    "profile": parse_profile,
}
# Below this a correction is the rounding of a fall between two points.
_SMALL_CHANGE = 0.005
_MOST_SEEN = 100_000
"""Bytes of a file in which keys are looked for."""


@dataclass(frozen=True, kw_only=True)
class CheckedFile:
    """One file, with what is in it or what is wrong with it."""

    path: Path
    kind: str | None
    """None where there is nothing to tell it from."""
    content: Content | None = None
    error: ZorseError | None = None

    @property
    def shown(self) -> Iterator[str | Table]:
        """What is wrong with it; or what is in it, in one line, and more below."""
        if self.content is None:
            yield str(self.error)
            return
        line, more, _ = _described(self.content)
        yield f"{self.path}: OK, {line}"
        yield from more

    @property
    def values(self) -> dict[str, Any]:
        """The same as JSON values."""
        found = {} if self.content is None else _described(self.content)[2]
        return {"path": str(self.path), "kind": self.kind, "ok": self.error is None, **found}


def check_model(name: str) -> CheckedFile:
    """Take a model as other commands do, but for flags: a file, a folder, or a well-known one."""
    path = Path(name)
    try:
        workload = named_model(name)
    except ZorseError as error:
        return CheckedFile(path=path, kind="model", error=error)
    # A well-known one is as long as a plan says.
    is_known = not config_path(name).is_file()
    workload = dataclasses.replace(workload, lacks_seq_length=workload.lacks_seq_length or is_known)
    return CheckedFile(path=path, kind="model", content=workload)


def check_file(path: Path) -> CheckedFile:
    """Read a file of any kind; of a folder its config.json."""
    path, kind = config_path(path), None
    try:
        data = read_file(path, _kind_of_name(path), article=_ANY_KIND)
        kind = _kind_of(data, path).name
        content = _PARSERS[kind](data, source=str(path))
        if isinstance(content, Plan):
            refuse_unsupported(content, str(path))
    except ZorseError as error:
        return CheckedFile(path=path, kind=kind, error=error)
    return CheckedFile(path=path, kind=kind, content=content)


def _kind_of(data: bytes, path: Path) -> FileKind:
    """The kind that alone has most of the file's keys; where none has any, what the name suggests.

    Keys are looked for in the text, as the file may be cut off.
    """
    keys = {each.decode() for each in re.findall(rb"\w+(?=[\"']?\s*:)", data[:_MOST_SEEN])}
    if "model_type" in keys or path.name.endswith(_OF_HUGGING_FACE):
        return CONFIG_FILE
    fields = {
        kind.name: [field.name for field in dataclasses.fields(kind.root)]
        for kind in (PLAN_FILE, CLUSTER_FILE, PROFILE_FILE)
    }
    fields[CONFIG_FILE.name] = list(_OF_MODELS)
    # Keys that several kinds have, such as `name`, say nothing.
    counts = Counter(field for names in fields.values() for field in names)
    own = {name: keys & {each for each in of if counts[each] == 1} for name, of in fields.items()}
    best = max(_KINDS, key=lambda kind: len(own[kind.name]))
    return best if own[best.name] else _kind_of_name(path)


def _kind_of_name(path: Path) -> FileKind:
    if path.suffix.lower() in (".yaml", ".yml"):
        return CLUSTER_FILE
    if path.name.lower().endswith(_OF_HUGGING_FACE):
        return CONFIG_FILE
    return next((kind for kind in _KINDS if kind.name in path.name.lower()), PLAN_FILE)


def _described(content: Content) -> tuple[str, Sequence[str | Table], dict[str, Any]]:
    """What is in a valid file: in one line, what goes below it, and as JSON values."""
    match content:
        case Plan():
            values = {"fingerprint": fingerprint(content), "plan": plain(content)}
            return plan_line(content), [plan_table(content)], values
        case Cluster():
            return _cluster(content)
        case Workload():
            return _model(content)
        case Profile():
            return _profile(content)


def _cluster(cluster: Cluster) -> tuple[str, Sequence[str], dict[str, Any]]:
    kinds, notes = Counter(cluster.gpu_kinds), build_notes(list(cluster.kinds))
    gpus = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
    name = f" {cluster.name}" if cluster.name else ""
    line = (
        f"cluster{name}: {number_of(cluster.world_size, 'GPU')} on "
        f"{number_of(len(cluster.nodes), 'node')}: {gpus}"
    )
    values = {
        "name": cluster.name,
        "world_size": cluster.world_size,
        "nodes": len(cluster.nodes),
        "gpu_kinds": dict(kinds),
        "notes": notes,
    }
    return line, [f"  note: {each}" for each in notes], values


def _model(workload: Workload) -> tuple[str, Sequence[str], dict[str, Any]]:
    model = workload.model
    line = (
        f"model {model.name}: {model.num_parameters / 1e9:.2f} billion parameters, "
        f"{number_of(model.num_layers, 'layer')}, hidden size {model.hidden_size}, "
        f"sequence length {model.seq_length}"
    )
    values = {
        "name": model.name,
        "num_parameters": model.num_parameters,
        **vars(model.fingerprint()),
        "notes": list(workload.notes),
    }
    return line, [f"  note: {each}" for each in workload.notes], values


def _profile(profile: Profile) -> tuple[str, Sequence[str | Table], dict[str, Any]]:
    by_kind: dict[str, list[Times]] = defaultdict(list)
    for times in profile.times:
        by_kind[times.gpu_kind].append(times)
    kinds = {
        kind: {
            "models": list(dict.fromkeys(times.model for times in series)),
            "seq_lengths": sorted({times.seq_length for times in series}),
            "dtypes": sorted({times.dtype for times in series}),
            "series": len(series),
            "points": sum(len(times.micro_batch_sizes) for times in series),
        }
        for kind, series in by_kind.items()
    }
    table = Table("GPU", "Models", "Sequence lengths", "Dtypes", "Series", "Points")
    for kind, facts in kinds.items():
        lists = [each if isinstance(each, list) else [each] for each in facts.values()]
        table.add_row(kind, *(Text(", ".join(map(str, each))) for each in lists))
    unlikely = list(unlikely_times(profile, GPU_KINDS))
    replaced = [entry for times in profile.times for entry in _replaced(times)]
    values = {
        "sources": [dataclasses.asdict(source) for source in profile.sources],
        "gpu_kinds": kinds,
        "models": [model.name for model in profile.models],
        "series": len(profile.times),
        "unlikely": unlikely,
        "not_believed": replaced,
    }
    below: list[str | Table] = [f"  unlikely: {each}" for each in unlikely]
    below += [table, *map(_replaced_line, replaced)]
    return f"profile: {profile_counts(profile)}", below, values


def profile_counts(profile: Profile) -> str:
    """How much of what has been measured."""
    messages = f", {len(profile.transfers)} series of messages" if profile.transfers else ""
    return (
        f"{len(profile.times)} series of times on "
        f"{number_of(len(profile.gpu_kinds()), 'kind of GPU', 'kinds of GPU')}, "
        f"{number_of(len(profile.updates), 'optimizer step')}, "
        f"{number_of(len(profile.memory), 'memory entry', 'memory entries')}, "
        f"{number_of(len(profile.links), 'link')}{messages}"
    )


def _replaced(times: Times) -> Iterator[dict[str, Any]]:
    """Measured points that the fitted curves do not pass through."""
    series = ("gpu_kind", "model", "seq_length", "dtype", "tensor_parallel", "part")
    for direction in ("forward", "backward"):
        _, points = fit_curve(times.micro_batch_sizes, getattr(times, f"{direction}_s"))
        for point in points:
            if abs(point.used_s - point.measured_s) > _SMALL_CHANGE * point.used_s:
                of = {name: getattr(times, name) for name in series}
                yield {**of, "direction": direction, **dataclasses.asdict(point)}


def _replaced_line(entry: dict[str, Any]) -> str:
    return (
        f"  replaced: {entry['gpu_kind']}, {entry['model']} at sequence length "
        f"{entry['seq_length']} in {entry['dtype']}, tensor parallel {entry['tensor_parallel']}, "
        f"{entry['part']} {entry['direction']}, micro-batch {entry['micro_batch_size']}: "
        f"{1e3 * entry['measured_s']:.3f} ms, used {1e3 * entry['used_s']:.3f} ms"
    )
