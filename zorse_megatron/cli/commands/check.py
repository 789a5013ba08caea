"""`zorse check`: validate files, alone and together."""

import dataclasses
import difflib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from zorse_megatron.cli.commands.measure import counts_of
from zorse_megatron.cli.console import gib, plain_problems, print_answer, refusal, reported_errors
from zorse_megatron.cli.options import AsJson, Margin, WorkloadOptions, checked_share, with_bundles
from zorse_megatron.cli.simulated import (
    capacities_bytes,
    fullest_rank,
    memory_problems,
    simulated,
    types_of,
)
from zorse_megatron.cli.tables import plan_line, plan_summary, plan_table
from zorse_megatron.cli.workload import (
    Workload,
    at_seq_length,
    dtype_named,
    model_in,
    model_or_flags,
    named_model,
)
from zorse_megatron.cli.workload_costs import costs_on, workload_in_flags, workload_problems
from zorse_megatron.costs.measured_curves import unlikely_times
from zorse_megatron.errors import FlagError, PlanError, Problem, ZorseError
from zorse_megatron.files.strict import FileKind, read_file
from zorse_megatron.files.wording import number_of
from zorse_megatron.files.yaml_text import read_yaml
from zorse_megatron.flags.torch_builds import build_notes
from zorse_megatron.gpus.gpu import Dtype, GpuKind
from zorse_megatron.gpus.known_gpus import GPU_KINDS
from zorse_megatron.inputs.cluster import Cluster
from zorse_megatron.inputs.cluster_yaml import CLUSTER_FILE, parse_cluster
from zorse_megatron.inputs.hugging_face import CONFIG_FILE, config_path
from zorse_megatron.inputs.profile import PROFILE_FILE, Profile, parse_profile
from zorse_megatron.inputs.rank_placement import cluster_problems
from zorse_megatron.plan.plan import Plan
from zorse_megatron.plan.plan_file import PLAN_FILE, parse_plan
from zorse_megatron.schedule.lower import refuse_unsupported

# Validate files, alone (plan, cluster, model or profile) and together with training flags.


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
    matches = {
        name: sum(_is_among(key, (field for field in names if counts[field] == 1)) for key in keys)
        for name, names in fields.items()
    }
    best = max(matches.values())
    if not best:
        return _kind_of_name(path)
    return next(kind for kind in _KINDS if matches[kind.name] == best)


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


@dataclass(frozen=True, kw_only=True)
class Checked:
    """One comparison: what with what, and what came of it."""

    what: str
    found: str
    """For people; empty where there are problems."""
    error: ZorseError | None


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """What the command line says beside files and flags; None: nothing."""

    dtype: Dtype | None = None
    global_batch_size: int | None = None
    seq_length: int | None = None
    margin: float = 0.0
    """Share of each GPU's memory that is to stay free."""


def checks_of(
    files: Sequence[CheckedFile], flags: Sequence[str] | None, options: CheckOptions
) -> list[Checked]:
    """Compare every plan with every cluster and model among the valid files, and with the flags."""
    plans = [(file.path, file.content) for file in files if isinstance(file.content, Plan)]
    if flags is not None and not plans:
        found = _flags_alone()
        return [found] if all(file.error is None for file in files) else []
    return [check for path, plan in plans for check in _of_plan(path, plan, files, flags, options)]


def _of_plan(
    path: Path,
    plan: Plan,
    files: Sequence[CheckedFile],
    flags: Sequence[str] | None,
    options: CheckOptions,
) -> list[Checked]:
    source = str(path)
    checks: list[Checked] = []
    clusters: list[tuple[Path, Cluster]] = []
    workloads: list[tuple[str, Workload]] = []
    for file in files:
        if isinstance(file.content, Cluster):
            problems = list(cluster_problems(plan, file.content, source))
            clusters += [] if problems else [(file.path, file.content)]
            checks.append(_checked(f"{path} on {file.path}", "every rank has its GPU", problems))
        elif isinstance(file.content, Workload):
            workload = _of_this_plan(file.content, plan, options)
            problems = list(workload_problems(plan, workload, source))
            workloads += [] if problems else [(str(file.path), workload)]
            checks.append(_checked(f"{path} for {file.path}", "the same model", problems))
    if flags is not None:
        kinds = {name: gpu for _, each in clusters for name, gpu in each.kinds.items()}
        check, in_flags = _flags(path, plan, flags, options, kinds)
        checks.append(check)
        workloads += [("the training command", in_flags)] if in_flags else []
    profiles = [file.path for file in files if isinstance(file.content, Profile)]
    for cluster_path, cluster in clusters:
        for name, workload in workloads:
            what = f"memory of {path} on {cluster_path} with {name}"
            check_memory = partial(
                _memory, plan, cluster, workload, profiles, source, options.margin
            )
            checks.append(_attempt(what, check_memory))
    return checks


def _of_this_plan(model: Workload, plan: Plan, options: CheckOptions) -> Workload:
    """What options and plan say of a model's training."""
    length = options.seq_length or (plan.model.seq_length if model.lacks_seq_length else None)
    workload = model if length is None else at_seq_length(model, length)
    batch = options.global_batch_size
    return replace(workload, dtype=options.dtype, global_batch_size=batch)


def _flags(
    path: Path,
    plan: Plan,
    flags: Sequence[str],
    options: CheckOptions,
    kinds: Mapping[str, GpuKind],
) -> tuple[Checked, Workload | None]:
    what = f"{path} with the training command"
    try:
        workload, has_vocabulary = workload_in_flags(
            flags,
            plan,
            kinds,
            dtype=options.dtype,
            global_batch_size=options.global_batch_size,
            seq_length=options.seq_length,
        )
    except ZorseError as error:
        return Checked(what=what, found="", error=error), None
    problems = list(workload_problems(plan, workload, str(path)))
    if problems:
        misfit = FlagError(f"the training command does not fit {path}", problems)
        return Checked(what=what, found="", error=misfit), None
    found = "the same model"
    if workload.global_batch_size is not None:
        found += " and global batch size"
    if not has_vocabulary:
        found += "; without --vocab-size its vocabulary was not compared"
    return Checked(what=what, found="; ".join((found, *workload.notes)), error=None), workload


def _flags_alone() -> Checked:
    problem = Problem(
        where="--",
        found="training flags without a plan",
        expected="a plan to compare them with",
        remedy="Name the plan's file before --.",
    )
    error = FlagError("the training command cannot be checked", [problem])
    return Checked(what="training command", found="", error=error)


def _memory(  # noqa: PLR0917
    plan: Plan,
    cluster: Cluster,
    workload: Workload,
    profiles: Sequence[Path],
    source: str,
    margin: float,
) -> str:
    """Say how full the fullest GPU gets. Raises PlanError where one overflows."""
    from zorse_megatron.planner.simulate_plan import host_needs, host_problems, host_sentences

    costs = costs_on(plan, cluster, workload, profiles)
    result = simulated(plan, costs, source=source)
    needs = host_needs(costs.inputs, result)
    problems = [
        *memory_problems(plan, result, cluster, source, margin=margin),
        *host_problems(needs, "as the plan's offload settings say"),
    ]
    if problems:
        raise PlanError(f"{source} does not fit into memory", problems)
    rank, share = fullest_rank(result, cluster)
    peak, capacity = result.peak_memory_bytes[rank], capacities_bytes(cluster)[rank]
    return (
        f"at most {100 * share:.0f} % of a GPU: rank {rank} ({cluster.gpu_kinds[rank]}) with "
        f"{gib(peak)} of {gib(capacity)}, computing in {types_of(plan, costs)}. "
        + " ".join([*host_sentences(needs), *(f"{each}." for each in costs.inputs.warnings)])
    )


def _checked(what: str, found: str, problems: Sequence[Problem]) -> Checked:
    if problems:
        return Checked(what=what, found="", error=PlanError(f"{what}: no match", problems))
    return Checked(what=what, found=found, error=None)


def _attempt(what: str, check: Callable[[], str]) -> Checked:
    try:
        return Checked(what=what, found=check(), error=None)
    except ZorseError as error:
        return Checked(what=what, found="", error=error)


Files = Annotated[
    list[Path] | None,
    typer.Argument(metavar="[FILE]...", help="Plans, clusters, models, profiles, in any order."),
]


@with_bundles
def check(
    *,
    paths: Files = None,
    cluster: Annotated[
        Path | None, typer.Option("--cluster", metavar="YAML", help="A cluster file, as FILE.")
    ] = None,
    given: WorkloadOptions,
    margin: Margin = 0.0,
    as_json: AsJson = False,
) -> None:
    """Validate files, alone and together: summarize them, or list every problem (exit code 1).

    Flags after -- are compared with the plan. With a plan, a cluster and a model (or flags), memory
    is checked too.
    """
    with reported_errors(to_stderr=False, as_json=as_json):
        options = CheckOptions(
            dtype=dtype_named(given.dtype),
            global_batch_size=given.global_batch_size,
            seq_length=given.seq_length,
            margin=checked_share(margin, "--margin"),
        )
        name, flags = model_or_flags(given.model, given.flags)
        named = [*(paths or ()), *([cluster] if cluster else ()), *given.profiles]
        files = [*map(check_file, named), *map(check_model, [name] if name else ())]
        if not files:
            raise refusal(
                "FILE",
                "no file",
                "a plan, cluster, model or profile, or --model",
                "Such as: zorse check plan.json cluster.yaml --model llama-7b",
            )
        together = checks_of(files, flags, options)
    errors = [file.error for file in files] + [each.error for each in together]
    found = [error for error in errors if error is not None]
    print_answer(_as_json(files, together, found), _shown(files, together), as_json=as_json)
    if found:
        raise typer.Exit(1)


def _shown(files: Sequence[CheckedFile], together: Sequence[Checked]) -> Iterator[str | Table]:
    for file in files:
        yield str(file.error) if file.error else file.line
        if isinstance(file.content, Plan):
            yield plan_table(file.content)
    for each in together:
        yield str(each.error) if each.error else f"{each.what}: OK, {each.found}"


def _as_json(
    files: Sequence[CheckedFile], together: Sequence[Checked], errors: Sequence[ZorseError]
) -> dict[str, Any]:
    return {
        "ok": not errors,
        "problems": plain_problems([problem for error in errors for problem in error.problems]),
        "files": [
            {"path": str(file.path), "kind": file.kind, "ok": file.error is None, **file.summary}
            for file in files
        ],
        "together": [
            {"what": each.what, "ok": each.error is None, "found": each.found} for each in together
        ],
    }
