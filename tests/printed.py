"""Runs the commands that documents print, as they are printed but for what a caller puts in place.

In this process: a start of Python for every command costs more than most of the commands do.
"""

import pickle
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from string import Template

import pytest
from typer.testing import CliRunner

from zorse_megatron.cli.main import app
from zorse_megatron.planner import find_plan as search_module
from zorse_megatron.planner import other_searches as replan_module


@contextmanager
def each_search_once() -> Iterator[None]:
    """Several commands search for the same plan: the second time the first answer will do."""
    search, found = search_module.find_plan, {}

    def find_plan(inputs, **options):
        said = inputs.memory.activation_bytes(1, "none"), inputs.memory.gradient_bytes(1)
        what = inputs.spec, inputs.kinds, inputs.global_batch_size, said
        key = pickle.dumps((what, options.get("strategy")))
        if key not in found:
            found[key] = search(inputs, **options)
        return found[key]

    with pytest.MonkeyPatch.context() as patch:
        for module in (search_module, replan_module):
            patch.setattr(module, "find_plan", find_plan)
        yield


def words_of(line: str, variables: Mapping[str, str]) -> list[str]:
    """The words of a line after the shell has put in its variables."""
    return shlex.split(Template(line).substitute(variables))


def run_zorse(words: list[str]) -> str:
    """Run `zorse ...`, `> FILE` included; what it prints. Anything but success is an error."""
    program, *rest = words
    assert program == "zorse"
    *rest, target = rest if rest[-2:-1] == [">"] else (*rest, "")
    arguments = rest[:-1] if target else rest
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, f"{shlex.join(words)}\n{result.output}"
    if target:
        Path(target).write_text(result.stdout, encoding="utf-8")
    return result.stdout
