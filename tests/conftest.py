"""What holds for all tests."""

import functools
import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer import testing

from tests.shared import share_in

TESTS = Path(__file__).parent
# There is a process for each processor: more threads would spin while they wait for one.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Typer makes every command anew each time one is run: most of what a short one takes.
testing._get_command = functools.cache(testing._get_command)


@pytest.fixture(scope="module", autouse=True)
def _without_megatron() -> Iterator[None]:
    """The test process never imports Megatron.

    It would take each run of the tests seconds, and CPU mode, which is for good, must come first.
    """
    yield
    assert "megatron.core" not in sys.modules, "a test of this file has imported Megatron"


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_FailuresAtOnce(config))


# Files whose tests mostly wait, for Slurm or for limits of time, the longest first.
_WAITING = (
    "slurm/test_elastic.py",
    "slurm/test_slurm.py",
    "megatron/test_tutorial.py",
    "ranks/test_watch.py",
)
_APART = 16


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep files that wait apart: several at a time would leave processors without work."""
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    waiting = [TESTS / name for name in _WAITING if TESTS / name in files]
    order = [path for path in files if path not in waiting]
    for number, path in enumerate(waiting):
        order.insert(number * _APART, path)
    items[:] = [item for path in order for item in files[path]]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    """Of modules and tests nothing is garbage: looking for it takes a third of their import."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


class _FailuresAtOnce:
    """Names each failure when it happens: a run that is cut off names its failures too."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        terminal = self._config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and terminal is not None:
            terminal.write_line(f"\nFAILED {report.nodeid} ({report.when})", red=True)


@pytest.fixture(scope="session", autouse=True)
def _shared(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> None:
    share_in(tmp_path_factory, pytestconfig)
