"""CPU mode: what it replaces, what it leaves alone, and when it refuses.

That of several ranks only rank 0 says so is seen in `test_tutorial`.
"""

import subprocess
import sys
from types import ModuleType

import pytest

from tests.megatron.launch import REPOSITORY, MegatronServer
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
