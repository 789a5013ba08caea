"""What one test process makes and the others of the same run use, with pytest-xdist."""

import functools
import hashlib
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

import pytest
from filelock import FileLock

_DIRECTORY = "ZORSE_TEST_SHARED"
P = ParamSpec("P")
R = TypeVar("R")


def share_in(factory: pytest.TempPathFactory, config: pytest.Config) -> None:
    """Name the directory of this test run, the same one in all its processes."""
    base = factory.getbasetemp()
    directory = (base.parent if hasattr(config, "workerinput") else base) / "shared"
    directory.mkdir(exist_ok=True)
    os.environ[_DIRECTORY] = str(directory)


def directory_of(name: str, make: Callable[[Path], None]) -> Path:
    """A directory that `make` has filled, once per test run."""
    target = Path(os.environ[_DIRECTORY], name)
    with FileLock(f"{target}.lock"):
        done = target / "done"
        if not done.exists():
            target.mkdir(exist_ok=True)
            make(target)
            done.touch()
    return target


def name_of(*what: object) -> str:
    """A name for a directory, the same for things with the same `repr`."""
    return hashlib.sha256(repr(what).encode()).hexdigest()[:24]


def once_per_run(make: Callable[P, R]) -> Callable[P, R]:
    """Call a function once for equal arguments, by their `repr`; what it returns must pickle."""

    @functools.cache
    def cached(*args: Any, **kwargs: Any) -> Any:
        name = name_of(make.__module__, make.__qualname__, args, sorted(kwargs.items()))

        def save(directory: Path) -> None:
            (directory / "result").write_bytes(pickle.dumps(make(*args, **kwargs)))

        return pickle.loads((directory_of(name, save) / "result").read_bytes())

    # What mypy infers of the two decorators together differs from run to run.
    return cast("Callable[P, R]", functools.wraps(make)(cached))
