"""Names in backticks are names that there are: in docstrings, comments, messages and documents.

Nothing is imported: files are parsed, or searched for words, ours and Megatron's that is installed.
"""

import ast
import importlib.util
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "zorse_megatron"
SOURCES = sorted(
    path for own in (PACKAGE, ROOT / "tests", ROOT / "scripts") for path in own.rglob("*.py")
)
SOURCES.remove(Path(__file__))
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("patches/*.md")])
IN_BACKTICKS = re.compile(r"`([^`\n]+)`")
DOTTED = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+)(?:\(.*\))?")
# Others are words as well.
LONG = re.compile(r"([A-Za-z]\w*_\w+|_\w+|[A-Z]\w*[a-z]\w*)(?:\(.*\))?")
SOURCE_FILE = re.compile(r"(?<![\w/.])((?:[\w-]+/)+[\w-]+\.(?:py|md))\b")
FILE_ENDINGS = {"bin", "conf", "csv", "html", "idx", "json", "old", "png", "sh", "txt", "yaml"}

# What is told of other projects than Megatron.
MODULES_OF_OTHERS = {
    *("dist", "importlib", "itertools", "multiprocessing", "os", "subprocess", "sys", "torch"),
}
NAMES_OF_OTHERS = {
    # torch
    *("TORCH_DIST_INIT_BARRIER", "_hash_ranks_to_str"),
    *("CPUOffloadPolicy", "PYTORCH_ALLOC_CONF", "PowerOf2Ceil", "Schedule1F1B"),
    *("ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble", "ScheduleLoopedBFS"),
    *("ZeroRedundancyOptimizer", "_StorageInfo"),
    *("_assign_worker_ranks", "_single_tensor_adam", "n_microbatches", "reduce_dtype"),
    *("calc_execution_policy", "compute_XY", "pinned_max_round_threshold_mb", "sm_XY"),
    # transformers, Slurm, Linux, Sailor and the DeepSpeed that it brings
    *(
        "SlurmdTimeout",
        "LlamaConfig",
        "JobRequeue",
        "ip_local_port_range",
        "PipelineEngine",
        "reconstruct_tensor",
    ),
    # peft
    "get_peft_model_state_dict",
    # Transformer Engine, and cuBLAS in torch
    *("NVTE_MASKED_SOFTMAX_FUSION", "get_attention_backend", "get_cublas_workspace_size_bytes"),
    "WeightGradStore",
    "parseChosenWorkspaceSize",
    # Megatron-LM's files that are not in the package
    *("SPIKY_LOSS_FACTOR", "gpt_builders"),
}
FOLDERS_OF_OTHERS = ("auto_parallel/", "deepspeed/", "distributed/elastic/", "sailor/", "torch/")
MADE_UP = ("dir/",)


@cache
def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@cache
def words_of_ours() -> set[str]:
    """Every word that stands in our files without backticks, and the names of the files."""
    found = {path.stem for path in SOURCES}
    for path in (*SOURCES, *PACKAGE.rglob("*.json"), *PACKAGE.rglob("*.yaml")):
        found |= set(re.findall(r"\w+", IN_BACKTICKS.sub("", text_of(path))))
    return found


@cache
def megatron() -> Path:
    spec = importlib.util.find_spec("megatron")
    assert spec is not None and spec.submodule_search_locations
    return Path(next(iter(spec.submodule_search_locations)))


@cache
def words_of_megatron() -> set[str]:
    found: set[str] = set()
    for path in megatron().rglob("*.py"):
        found |= {path.stem, *re.findall(r"\w+", path.read_text(encoding="utf-8"))}
    return found


def is_word(name: str) -> bool:
    return name in words_of_ours() or name in words_of_megatron() or name in NAMES_OF_OTHERS


@cache
def names_in(path: Path) -> dict[str, set[str]]:
    """What a file defines -> what a class has: methods, fields, attributes of self."""
    found: dict[str, set[str]] = {}
    for node in ast.walk(ast.parse(text_of(path))):
        if isinstance(node, ast.ClassDef):
            found[node.name] = set(_bound_in(node))
    return found | {
        name: set() for name in _bound_in(ast.parse(text_of(path))) if name not in found
    }


def _bound_in(node: ast.AST) -> Iterator[str]:
    for each in ast.walk(node):
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield each.name
        elif isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store):
            yield each.id
        elif isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store):
            yield each.attr
        elif isinstance(each, ast.alias):
            yield each.asname or each.name


@cache
def places_of_classes() -> dict[str, list[Path]]:
    """Class of ours -> the files that define one of that name."""
    found: dict[str, list[Path]] = {}
    for path in SOURCES:
        for name in re.findall(r"^\s*class (\w+)", text_of(path), re.MULTILINE):
            found.setdefault(name, []).append(path)
    return found


def scopes(path: Path) -> list[Path]:
    """Folders that a name may start from: those above the file, then our package."""
    return [*(each for each in path.parents if ROOT in each.parents), ROOT, PACKAGE]


def is_there(name: str, path: Path) -> bool:
    """Whether a dotted name that a file tells of is one."""
    head, *rest = name.split(".")
    if head in MODULES_OF_OTHERS or rest[-1] in FILE_ENDINGS:
        return True
    if rest[-1] == "py":
        return is_word(head)
    if head == "megatron":
        return _is_in(megatron(), rest)
    for folder in scopes(path):
        is_module = folder != ROOT and (folder / f"{head}.py").is_file()
        if is_module or (folder / head).is_dir():
            return _is_in(folder, [head, *rest])
    if any(rest[0] in names_in(place)[head] for place in places_of_classes().get(head, ())):
        return True
    # A variable's attribute, a key of a file, what a class inherits.
    return all(map(is_word, rest))


def _is_in(folder: Path, parts: list[str]) -> bool:
    while parts and (folder / parts[0]).is_dir():
        folder, parts = folder / parts[0], parts[1:]
    if not parts:
        return True
    module, parts = (
        (folder / f"{parts[0]}.py", parts[1:])
        if (folder / f"{parts[0]}.py").is_file()
        else (folder / "__init__.py", parts)
    )
    if not parts:
        return True
    found = names_in(module) if module.is_file() else {}
    return parts[0] in found and (len(parts) == 1 or parts[1] in found[parts[0]])


def lost_in(path: Path, text: str) -> Iterator[str]:
    """Yield what a text tells of and is not there."""
    for told in IN_BACKTICKS.findall(text):
        if match := DOTTED.fullmatch(told):
            found = is_there(match[1], path)
        elif match := LONG.fullmatch(told):
            found = is_word(match[1])
        else:
            continue
        if not found:
            yield match[1]
    for file in SOURCE_FILE.findall(text):
        places = [*scopes(path), megatron(), megatron().parent]
        if not file.startswith((*FOLDERS_OF_OTHERS, *MADE_UP)) and not any(
            (p / file).exists() for p in places
        ):
            yield file


def test_names_are_there():
    lost = {path: list(lost_in(path, text_of(path))) for path in (*SOURCES, *DOCUMENTS)}
    found = {str(path.relative_to(ROOT)): names for path, names in lost.items() if names}
    assert not found, "not ours and not Megatron's; others' go into NAMES_OF_OTHERS"


@pytest.mark.parametrize(
    "name",
    [
        "schedule.shards.intersection",
        "shards.intersection",  # from within schedule
        "lower.lower_plan",
        "Boundaries.after_chunk",
        "megatron.core.optimizer.distrib_optimizer.DistributedOptimizer.step_with_ready_grads",
        "lower_plan(plan)",
    ],
)
def test_the_check_knows_what_is_there(name):
    assert not list(lost_in(PACKAGE / "schedule" / "lower.py", f"See `{name}`."))


@pytest.mark.parametrize(
    "name",
    [
        "schedule.gone",
        "schedule.shards.gone",
        "simulate.meetings.Meetings",
        "shards.gone",
        "Boundaries.behind_it",
        "lower_gone_plan",
        "megatron.core.optimizer.distrib_optimizer.DistributedOptimizer.gone",
        "schedule/gone.py",
    ],
)
def test_the_check_finds_what_is_lost(name):
    assert list(lost_in(PACKAGE / "schedule" / "lower.py", f"See `{name}`.")) == [name]
