"""Processes that a rank starts: what saves outlives the TERM that Slurm sends to all processes, and
what loads data ends with the rank, however that ends.
"""

import signal
import subprocess
import sys
import weakref

import pytest

from zorse_megatron import pretrain

SPAWNED = """\
import os, runpy, signal
runpy.run_module("zorse_megatron.pretrain", run_name={name!r}, alter_sys=True)
os.kill(os.getpid(), signal.SIGTERM)
"""


def status_of(name: str) -> int:
    """As `multiprocessing.spawn._fixup_main_from_name` runs the module of the parent's main."""
    return subprocess.run([sys.executable, "-c", SPAWNED.format(name=name)], check=False).returncode


@pytest.mark.slow
def test_a_spawned_process_ignores_the_signal() -> None:
    assert status_of("__mp_main__") == 0


@pytest.mark.slow
def test_whoever_imports_the_module_does_not() -> None:
    assert status_of("zorse_megatron.pretrain") == -signal.SIGTERM


def test_what_fails_lets_go_of_its_iterators(monkeypatch):
    """Before Python waits for their workers: it keeps the error, and so its frames, until then."""
    held = []

    def run(argv, *, setup=None):
        iterator = type("Iterator", (), {})()
        held.append(weakref.ref(iterator))
        raise ValueError(argv)

    monkeypatch.setattr(pretrain, "run", run)
    with pytest.raises(ValueError, match="flag") as kept:
        pretrain.main(["flag"])
    assert held[0]() is None, kept
