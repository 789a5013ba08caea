"""Where the package asks whether there is a GPU, and what takes the side of CUDA without one.

Whoever adds such a question adds a line here: what runs that side in the tests, or that nothing
does. `torch.cuda` itself needs none: CPU mode stands in for it, and the rehearsal of streams
(`tests/megatron/rehearsal.py`) has all that follows from `CudaStreams` and `HostLink.is_cuda`.
"""

import ast
from collections import Counter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "zorse_megatron"
FIELDS = {"is_cuda", "is_gpu", "is_available", "device_count", "hip"}
NAMES = {"cuda", "cpu", "nccl", "gloo"}
"""Of devices and backends; compared with one."""

CHOOSES_CPU_MODE = "every test that trains: it decides between CUDA and CPU mode"
REHEARSED = "tests/megatron/test_rehearsal.py"
NCCL = "tests/megatron/test_nccl_order.py"
SOFTWARE = "tests/unit/test_found_software.py"
DISPATCH = "tests/unit/test_kernel_dispatch.py"
DOCTOR = "nothing: zorse doctor, on a GPU"
MEASURING = "nothing: zorse discover or zorse profile measure, on a GPU"
# Module and function -> how often it asks, and what takes the side of CUDA.
BRANCHES = {
    "adapter/cpu_mode": (1, CHOOSES_CPU_MODE),
    "adapter/cpu_mode _obstacles": (1, "nothing: it refuses CPU mode where there is a GPU"),
    "adapter/cpu_mode is_cuda_device": (2, CHOOSES_CPU_MODE),
    "adapter/groups/process_groups nccl_channels": (
        1,
        "nothing: a GPU's multiprocessors; tests/unit/test_communicators.py has what follows",
    ),
    "adapter/measuring_run run_until_built": (1, CHOOSES_CPU_MODE),
    "adapter/memory make_ledger": (1, "nothing: one call of torch, what its allocator had at most"),
    "adapter/memory host_need": (1, REHEARSED),
    "adapter/memory _attention": (1, "nothing: whether FlashAttention runs on this GPU"),
    "adapter/moving/state OwnedPart.device_bytes": (
        1,
        "nothing: state that is not in the host; without a GPU all counts as there",
    ),
    "adapter/rank_plan RankPlan.device": (1, "nothing: the GPU that torch has as its current one"),
    "adapter/start_checks gpu_of": (1, SOFTWARE),
    "adapter/start_checks take_gpu": (1, SOFTWARE),
    "adapter/start_checks found_software": (1, SOFTWARE),
    "adapter/start_checks _found": (1, "nothing: the name and memory of this rank's GPU"),
    "adapter/start_checks _unusable_gpus": (1, SOFTWARE),
    "adapter/training _session": (1, f"{REHEARSED}: CudaClock where the plan changes"),
    "adapter/watching _switching": (1, "nothing: which links there are; over gloo all may be"),
    "doctor/on_ranks machine": (1, DOCTOR),
    "doctor/on_ranks _context_bytes": (2, DOCTOR),
    "doctor/on_ranks _free_bytes": (1, DOCTOR),
    "doctor/on_ranks _start": (1, DOCTOR),
    "doctor/on_ranks _wait_for": (1, DOCTOR),
    "emulate/fork_server _refuse_broken_cuda": (2, "tests/unit/test_rank_environment.py"),
    "emulate/fork_server preload": (2, CHOOSES_CPU_MODE),
    "kernels/dispatch why_not_triton": (1, DISPATCH),
    "kernels/dispatch say_by_kind": (1, DISPATCH),
    "kernels/dispatch _reason": (2, DISPATCH),
    "kernels/grouped_gemm _pick": (1, "tests/kernels/test_grouped_gemm.py"),
    "kernels/grouped_gemm _in_fp32": (1, "nothing: how torch multiplies 16-bit numbers into fp32"),
    "kernels/grouped_gemm_on_triton _blocks": (1, "tests/kernels/compile_grouped_main.py"),
    "kernels/grouped_gemm_on_triton _table": (1, "nothing: a copy from pinned memory"),
    "measure/on_ranks/cluster_discovery timed_messages": (1, MEASURING),
    "measure/on_ranks/cluster_discovery _Message._wait_for_device": (1, MEASURING),
    "measure/on_ranks/cluster_discovery _known": (1, MEASURING),
    "measure/on_ranks/layer_timing held_memory": (1, MEASURING),
    "measure/on_ranks/layer_timing _context_bytes": (1, "tests/unit/test_seen_attention.py"),
    "measure/on_ranks/profile_run _measured": (1, MEASURING),
    "measure/on_ranks/ranks timed_s": (1, MEASURING),
    "measure/on_ranks/ranks measuring_job": (1, MEASURING),
    "measure/on_ranks/ranks _device": (2, MEASURING),
    "measure/on_ranks/ranks measured_kind": (2, MEASURING),
    "measure/on_ranks/ranks _copy_bytes_per_s": (1, MEASURING),
    "measure/on_ranks/ranks _host_link_bytes_per_s": (1, MEASURING),
    "pretrain _train": (1, CHOOSES_CPU_MODE),
    "runtime/collectives _is_gloo": (1, NCCL),
    "runtime/collectives start_stages": (1, "tests/unit/test_staged_operation.py"),
    "runtime/host_link HostLink.__init__": (3, "nothing: it makes two streams"),
    "runtime/host_link HostLink.new_host_bytes": (1, REHEARSED),
    "runtime/host_link HostLink._allocated": (1, "nothing: whether memory is pinned"),
    "runtime/host_link HostLink._release_free": (1, "nothing: torch's cache of pinned memory"),
    "runtime/host_link HostBacked.in_host": (1, REHEARSED),
    "runtime/transport make_transport": (3, NCCL),
    "runtime/transport world_options": (1, "tests/unit/test_links.py"),
}


class Questions(ast.NodeVisitor):
    """Counts them by the class and function that they are in."""

    def __init__(self, module: str) -> None:
        self.found: Counter[str] = Counter()
        self._where, self._scopes = module, []  # type: ignore[var-annotated]

    def _enter(self, node: ast.FunctionDef | ast.ClassDef) -> None:
        self._scopes.append(node.name)
        self.generic_visit(node)
        self._scopes.pop()

    visit_FunctionDef = visit_ClassDef = _enter

    def visit_Attribute(self, node: ast.Attribute) -> None:
        torch_built_for = node.attr == "cuda" and ast.unparse(node.value) == "torch.version"
        of_cpu_mode = node.attr in ("needed", "enabled") and ast.unparse(node.value) == "cpu_mode"
        is_read = isinstance(node.ctx, ast.Load)
        self._ask(is_read and (node.attr in FIELDS or torch_built_for or of_cpu_mode))
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        sides = (node.left, *node.comparators)
        parts = (each for side in sides for each in ast.walk(side))
        self._ask(any(isinstance(each, ast.Constant) and each.value in NAMES for each in parts))
        self.generic_visit(node)

    def _ask(self, is_question: bool) -> None:
        self.found[" ".join(filter(None, (self._where, ".".join(self._scopes))))] += is_question


def questions_in(source: str, module: str) -> dict[str, int]:
    visitor = Questions(module)
    visitor.visit(ast.parse(source))
    return {place: number for place, number in visitor.found.items() if number}


def test_every_question_whether_there_is_a_gpu_is_listed() -> None:
    found: dict[str, int] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        module = path.relative_to(PACKAGE).with_suffix("").as_posix()
        found |= questions_in(path.read_text(), module)
    assert found == {place: number for place, (number, _) in BRANCHES.items()}


def test_what_runs_them_is_there() -> None:
    named = {word.rstrip(":;") for _, why in BRANCHES.values() for word in why.split()}
    files = {word for word in named if word.startswith("tests/")}
    assert files and not [each for each in files if not (PACKAGE.parent / each).is_file()]


@pytest.mark.parametrize(
    "question",
    [
        "tensor.is_cuda",
        "torch.cuda.is_available()",
        'device.type == "cuda"',
        '"cpu" != self.device.type',
        "torch.version.cuda is None",
        "cpu_mode.enabled()",
        'dist.get_backend() != "nccl"',
        'device.type in ("cuda", "hip")',
    ],
)
def test_a_new_question_is_seen(question: str) -> None:
    source = f"class A:\n    def new(self):\n        if {question}:\n            wait()\n"
    assert questions_in(source, "runtime/new") == {"runtime/new A.new": 1}
    assert questions_in(source.replace(question, "torch.cuda.Stream"), "runtime/new") == {}
