"""CPU mode: what it replaces, what it leaves alone, and when it refuses.

That of several ranks only rank 0 says so is seen in `test_tutorial`.
"""

import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest

from tests.megatron.launch import REPOSITORY, MegatronServer
from tests.megatron.preloaded import run_megatron_ranks
from zorse_megatron.adapter import cpu_mode
from zorse_megatron.emulate.rank_jobs import server_environment
from zorse_megatron.errors import SeamError

MESSAGE = "zorse: no GPU found: Megatron runs on CPU over gloo"


def run_alone(module: str) -> str:
    """Run `module` in a fresh interpreter that has not imported torch."""
    finished = subprocess.run(
        [sys.executable, "-m", module],
        cwd=REPOSITORY,
        env=server_environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


def test_replaces_what_megatron_asks_and_no_more() -> None:
    output = run_alone("tests.megatron.cpu_mode_entry")
    assert output.splitlines() == [MESSAGE, "9 checks passed"]


def test_works_in_forked_children(megatron_server: MegatronServer) -> None:
    result = megatron_server.run_ranks(
        [], 1, entry="tests.megatron.cpu_mode_entry", timeout_s=60
    ).check()
    assert result.outputs == ("9 checks passed\n",)  # the server has said it once


def test_refuses_to_come_after_megatron(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "megatron.core", ModuleType("megatron.core"))
    with pytest.raises(SeamError, match=r"megatron\.core imported already"):
        cpu_mode.enable()


def test_refuses_to_hide_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_mode, "_torch_is_available", lambda: True)
    assert not cpu_mode.needed()
    with pytest.raises(SeamError, match="CUDA_VISIBLE_DEVICES="):
        cpu_mode.enable()


def test_refuses_a_torch_without_a_name_that_it_replaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cpu_mode.CUDA_SURFACE, "random.no_such_name", None)
    monkeypatch.setitem(sys.modules, "megatron.core", ModuleType("megatron.core"))
    with pytest.raises(SeamError, match=r"torch\.cuda\.random\.no_such_name"):
        cpu_mode.enable()


def test_does_not_touch_this_process() -> None:
    assert not cpu_mode.enabled()


def generations_seen(capabilities: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """For each: what stock's check of hardware queues is told, without a plan and under one."""
    import torch
    from megatron.training import arguments

    from tests.megatron.plans import LAYOUTS
    from zorse_megatron.adapter.arguments import argument_hooks
    from zorse_megatron.adapter.patches.rebind import REGISTRY

    hook = argument_hooks(LAYOUTS["2|1"], world_size=3)["gpu_generation"]
    found = []
    for major, minor in capabilities:
        shown = SimpleNamespace(major=major, minor=minor)
        torch.cuda.get_device_properties = lambda *_, shown=shown: shown  # type: ignore[assignment, misc]
        stock = arguments.get_device_arch_version()
        with REGISTRY.applied({"gpu_generation": hook}):
            found.append((stock, arguments.get_device_arch_version()))
    return found


def test_no_generation_asks_a_plan_for_one_hardware_queue() -> None:
    """CPU mode is an 8.0, and trains tensor-parallel plans; stock's rule is for those below 10."""
    capabilities = [(7, 0), (7, 5), (8, 0), (9, 0), (10, 0), (12, 0)]
    (found,) = run_megatron_ranks(1, generations_seen, capabilities)
    assert found == [(7, 10), (7, 10), (8, 10), (9, 10), (10, 10), (12, 12)]
