"""A process that a rank spawns to save outlives the TERM that Slurm sends to all processes."""

import signal
import subprocess
import sys

import pytest

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
