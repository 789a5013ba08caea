"""Recognise a file (plan, cluster, model or profile), validate it and summarize it."""

import dataclasses
import difflib
import json
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zorse_megatron.cli.commands.zorse_profile import counts_of
from zorse_megatron.cli.plan_table import plan_line, plan_summary
from zorse_megatron.cli.workload import Workload, model_in, named_model
from zorse_megatron.costs.unlikely import unlikely_times
from zorse_megatron.errors import ZorseError
from zorse_megatron.schedules.refusals import refuse_unsupported
from zorse_megatron.schema.cluster.cluster import Cluster
from zorse_megatron.schema.cluster.cluster_yaml import CLUSTER_FILE, parse_cluster
from zorse_megatron.schema.gpus.gpu_presets import GPU_KINDS
from zorse_megatron.schema.model.hugging_face import CONFIG_FILE, config_path
from zorse_megatron.schema.plan.plan import Plan
from zorse_megatron.schema.plan.plan_json import PLAN_FILE, parse_plan
from zorse_megatron.schema.profile.profile import Profile
from zorse_megatron.schema.profile.profile_json import PROFILE_FILE, parse_profile
from zorse_megatron.schema.text.counted import number_of
from zorse_megatron.schema.text.file_kind import FileKind
from zorse_megatron.schema.text.strict import read_file
from zorse_megatron.schema.text.yaml_text import read_yaml
from zorse_megatron.software.torch_builds import build_notes

Content = Plan | Cluster | Workload | Profile

# Of equally likely kinds the first one is taken.
_KINDS = (PLAN_FILE, CLUSTER_FILE, CONFIG_FILE, PROFILE_FILE)
_ANY_KIND = "a plan, cluster, model or profile"
_MAX_KEY = 40  # longer than any key of ours
_YAML_KINDS = (CLUSTER_FILE, CONFIG_FILE)
_OF_HUGGING_FACE = "config.json"
# The last two are of YAML files, which are refused as models.
_OF_MODELS = ("architectures", "hidden_size", "num_layers", "preset")
_PARSERS: dict[str, Callable[..., Content]] = {
    "plan": parse_plan,
    "cluster": parse_cluster,
    "model": model_in,
    "profile": parse_profile,
}


@dataclass(frozen=True, kw_only=True)
class CheckedFile:
    """One file, with what is in it or what is wrong with it."""

    path: Path
    kind: str | None
    """None where there is nothing to tell it from."""
    content: Content | None
    error: ZorseError | None

    @property
    def line(self) -> str:
        """What is in a valid file, in one line."""
        return f"{self.path}: OK, {_line(self.content)}"

    @property
    def summary(self) -> dict[str, Any]:
        """What is in a valid file, as JSON values."""
        return _summary(self.content)


def check_model(name: str) -> CheckedFile:
    """Take a model as other commands do, but for flags: a file, a folder, or a well-known one."""
    path = Path(name)
    try:
        workload = named_model(name)
    except ZorseError as error:
        return CheckedFile(path=path, kind="model", content=None, error=error)
    # A well-known one is as long as a plan says.
    is_known = not config_path(name).is_file()
    workload = dataclasses.replace(workload, lacks_seq_length=workload.lacks_seq_length or is_known)
    return CheckedFile(path=path, kind="model", content=workload, error=None)


def check_file(path: Path) -> CheckedFile:
    """Read a file of any kind; of a folder its config.json."""
    path = config_path(path)
    try:
        data = read_file(path, _kind_of_name(path), article=_ANY_KIND)
    except ZorseError as error:
        return CheckedFile(path=path, kind=None, content=None, error=error)
    kind = _kind_of(data, path)
    try:
        content = _PARSERS[kind.name](data, source=str(path))
        if isinstance(content, Plan):
            refuse_unsupported(content, str(path))
    except ZorseError as error:
        return CheckedFile(path=path, kind=kind.name, content=None, error=error)
    return CheckedFile(path=path, kind=kind.name, content=content, error=None)


def _kind_of(data: bytes, path: Path) -> FileKind:
    """The kind whose keys are at the top level; where none is, what the name suggests."""
    keys = _top_level_keys(data)
    if "model_type" in keys or path.name.endswith(_OF_HUGGING_FACE):
        return CONFIG_FILE
    fields = {kind.name: set(_keys_of(kind)) for kind in _KINDS}
    # Keys that several kinds have, such as `name`, say nothing.
    counts = Counter(field for names in fields.values() for field in names)
    told = {
        name: sum(_is_among(key, (field for field in names if counts[field] == 1)) for key in keys)
        for name, names in fields.items()
    }
    best = max(told.values())
    if not best:
        return _kind_of_name(path)
    return next(kind for kind in _KINDS if told[kind.name] == best)


def _keys_of(kind: FileKind) -> Iterable[str]:
    if kind is CONFIG_FILE:
        return _OF_MODELS
    return [field.name for field in dataclasses.fields(kind.root)]


def _is_among(key: str, names: Iterable[str]) -> bool:
    """Whether a key is one of the names, or a slip of the keyboard away from one."""
    return bool(difflib.get_close_matches(key[:_MAX_KEY], list(names), n=1, cutoff=0.85))


def _top_level_keys(data: bytes) -> set[str]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        try:
            value, _, _ = read_yaml(data, "file", CLUSTER_FILE)
        except ZorseError:
            return set()
    return set(value) if isinstance(value, dict) else set()


def _kind_of_name(path: Path) -> FileKind:
    kinds = _YAML_KINDS if path.suffix.lower() in (".yaml", ".yml") else _KINDS
    if path.name.lower().endswith(_OF_HUGGING_FACE):
        return CONFIG_FILE
    return next((kind for kind in kinds if kind.name in path.name.lower()), kinds[0])


def _line(content: Content | None) -> str:
    match content:
        case Plan():
            return plan_line(content)
        case Cluster():
            nodes = number_of(len(content.nodes), "node")
            gpus = number_of(content.world_size, "GPU")
            name = f" {content.name}" if content.name else ""
            notes = [f"\n  note: {each}" for each in build_notes(list(content.kinds))]
            return f"cluster{name}: {gpus} on {nodes}: {_gpus(content)}{''.join(notes)}"
        case Workload(model=model):
            notes = [f"\n  note: {each}" for each in content.notes]
            return (
                f"model {model.name}: {model.num_parameters / 1e9:.2f} billion parameters, "
                f"{number_of(model.num_layers, 'layer')}, hidden size {model.hidden_size}, "
                f"sequence length {model.seq_length}{''.join(notes)}"
            )
        case Profile():
            unlikely = [f"\n  unlikely: {each}" for each in unlikely_times(content, GPU_KINDS)]
            return f"profile: {counts_of(content)}{''.join(unlikely)}"
    return ""


def _gpus(cluster: Cluster) -> str:
    counts = Counter(cluster.gpu_kinds)
    return ", ".join(f"{count} x {kind}" for kind, count in counts.items())


def _summary(content: Content | None) -> dict[str, Any]:
    match content:
        case Plan():
            return plan_summary(content)
        case Cluster():
            return {
                "name": content.name,
                "world_size": content.world_size,
                "nodes": len(content.nodes),
                "gpu_kinds": dict(Counter(content.gpu_kinds)),
                "notes": build_notes(list(content.kinds)),
            }
        case Workload(model=model):
            return {
                "name": model.name,
                "num_parameters": model.num_parameters,
                **vars(model.fingerprint()),
                "notes": list(content.notes),
            }
        case Profile():
            return {
                "gpu_kinds": list(content.gpu_kinds()),
                "models": [model.name for model in content.models],
                "series": len(content.times),
                "unlikely": list(unlikely_times(content, GPU_KINDS)),
            }
    return {}
