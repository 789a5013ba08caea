"""Runs a program of the repository in this process: a start of Python takes longer than most do."""

import contextlib
import io
import runpy
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest


class Ended(NamedTuple):
    """How a program has ended, and what it has printed."""

    status: Any
    """As `sys.exit` takes it."""
    stdout: str
    stderr: str


def run_program(program: str | Path, *arguments: object) -> Ended:
    """Run a file, or a module by its name, as `python FILE` and `python -m NAME` do."""
    out, err, status = io.StringIO(), io.StringIO(), None
    printed = contextlib.redirect_stdout(out), contextlib.redirect_stderr(err)
    with pytest.MonkeyPatch.context() as patch, printed[0], printed[1]:
        patch.setattr(sys, "argv", [str(program), *map(str, arguments)])
        try:
            if isinstance(program, Path):
                patch.syspath_prepend(program.parent)
                runpy.run_path(str(program), run_name="__main__")
            else:
                patch.delitem(sys.modules, program, raising=False)
                runpy.run_module(program, run_name="__main__", alter_sys=True)
        except SystemExit as ended:
            status = ended.code
    return Ended(status or 0, out.getvalue(), err.getvalue())
