"""Bad input, as a table: what is written, and all that the command then says of it.

`bad_input.txt` has a section for each kind of file, whose rows go through `zorse check`, and one of
commands. A row is what is written: `PATH = VALUE` into a good file, `del PATH`, or `file TEXT`; of
clusters the whole file. After each => is one problem: `where: found this; expected that. Do so`,
in which `...` stands for anything, as does the end, and `expected that` alone for the same with the
path and value before it; or OK.
"""

import contextlib
import dataclasses
import json
import re
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.unit import plan_samples, profile_samples
from tests.unit.cli_samples import FLAGS_IN_ONE_TEXT, WORKLOAD, write_lab
from tests.unit.test_hugging_face import LLAMA_3_8B
from zorse_megatron.cli.checked_file import check_file
from zorse_megatron.cli.main import app
from zorse_megatron.errors import Problem

GOOD = {
    "plan": ("plan.json", plan_samples.good()),
    "rules of plans": ("plan.json", plan_samples.good()),
    "cluster": ("cluster.yaml", None),
    "profile": ("profile.json", profile_samples.good()),
    "model": ("config.json", LLAMA_3_8B),
}
ON_LAB = "plan.json --cluster cluster.yaml --model model.json"
WORDS = {
    "NODE": "gpus: 4 x T4, nics: 10 Gb/s",
    "FLAGS": FLAGS_IN_ONE_TEXT,
    "SHAPE": FLAGS_IN_ONE_TEXT.replace("--global-batch-size 16", ""),
    "plan ...": shlex.join(("plan", *WORKLOAD)),
    "compare ...": shlex.join(("compare", "--simulated", *WORKLOAD)),
    "explain ...": f"explain {ON_LAB}",
    "emulate ...": f"emulate {ON_LAB}",
    "launch ...": "launch plan.json --cluster cluster.yaml",
}


def rows() -> Iterator[tuple[str, list[str], list[str]]]:
    """Yield section, lines of what is written, and what is said."""
    section, given, said = "", [], []
    text = Path(__file__).with_name("bad_input.txt").read_text(encoding="utf-8")
    for line in [*text.splitlines(), "==="]:
        written, arrow, problem = line.partition("=> ")
        if (said and written.strip() != "") or line.startswith("==="):
            if said:
                yield section, given, said
            given, said = [], []
        if line.startswith("==="):
            section = line.removeprefix("=== ")
        elif line:
            given += [written.removesuffix(" ")] if written.strip() else []
            said += [problem] if arrow else []


OK = ["OK"]
ROWS = list(rows())


@pytest.fixture(scope="module", autouse=True)
def _folder(tmp_path_factory):
    """One for all rows, as each writes what it reads: a folder costs as much as a command."""
    with contextlib.chdir(tmp_path_factory.mktemp("bad")):
        yield


def keys_of(path: str) -> list[str | int]:
    return [int(key) if key.isdigit() else key for key in re.findall(r"[^.\[\]]+", path)]


def change(value: Any, line: str) -> None:
    """Do what one line says to JSON values."""
    path, is_set, new = line.partition(" = ")
    *keys, last = keys_of(path.removeprefix("del "))
    for key in keys:
        value = value[key]
    if not is_set:
        del value[last]
    elif isinstance(value, list) and last == len(value):
        value.append(json.loads(new))
    else:
        value[last] = json.loads(new)


def file_of(section: str, given: list[str]) -> str:
    """The text of a bad file."""
    good = json.loads(json.dumps(GOOD[section][1]))
    if good is None:
        return "\n".join(given).replace("NODE", WORDS["NODE"])
    if given[0].startswith("file"):
        return given[0][5:].replace("\\n", "\n")
    for line in given:
        change(good, line)
    return json.dumps(good)


def write_files(lines: list[str]) -> None:
    """Good files that go together, with what the lines say of some: `FILE: LINE`."""
    write_lab(Path())
    new: dict[str, Any] = {}
    for line in lines:
        name, _, text = line.partition(": ")
        if name.endswith(".json"):
            change(new.setdefault(name, json.loads(Path(name).read_text())), text)
        else:
            new[name] = new.get(name, "") + text + "\n"
    for name, content in new.items():
        Path(name).write_text(content if isinstance(content, str) else json.dumps(content))


def said_by(problems: Iterable[Problem]) -> list[str]:
    """The problems as text, after a look at how they are said."""
    for each in problems:
        assert all(dataclasses.astuple(each)), each
        assert re.search(r"[.?]$|: zorse [^:]+$", each.remedy), each
    return [str(each) for each in problems]


def problems_of(*command: str) -> list[str]:
    """What a command says that it found."""
    at = command.index("--") if "--" in command else len(command)
    result = CliRunner().invoke(app, [*command[:at], "--json", *command[at:]])
    assert result.exit_code in (1, 2), result.output
    assert isinstance(result.exception, SystemExit), result.exception
    assert not result.stderr
    answer = json.loads(result.stdout)
    assert answer["ok"] is False
    return said_by([Problem(**each) for each in answer["problems"]])


def told(section: str, text: str) -> list[str]:
    """What `zorse check` says of a file, without its name. As a command it takes twice as long."""
    name, _ = GOOD[section]
    Path(name).write_text(text, encoding="utf-8")
    error = check_file(Path(name)).error
    said = said_by(error.problems if error else ())
    assert all(each.startswith(f"{name}: ") for each in said), said
    return [each.removeprefix(f"{name}: ") for each in said]


def fits(pattern: str, said: str, given: str) -> bool:
    if pattern.startswith("expected "):
        pattern = given.replace(" = ", ": found ", 1) + f"...; {pattern}"
    parts = map(re.escape, pattern.split("..."))
    return re.match(".*".join(parts), said, re.DOTALL) is not None


@pytest.mark.parametrize(
    ("section", "given", "patterns"),
    [pytest.param(*row, id=f"{row[0]}: {' '.join(row[1])}"[:90]) for row in ROWS],
)
def test_all_that_is_wrong_is_told(section, given, patterns):
    if section == "commands":
        *files, command = given
        write_files(files)
        for word, meaning in WORDS.items():
            command = command.replace(word, meaning)
        said = problems_of(*shlex.split(command))
    else:
        said = told(section, file_of(section, given))
    patterns = [] if patterns == OK else patterns
    assert len(said) == len(patterns), said
    for pattern, each in zip(patterns, said, strict=True):
        assert fits(pattern, each, given[0]), each


def test_many_wrong_values_are_told_at_once():
    """All rows of one value in one file, but for those whose place another row is in."""
    plan, wrong = plan_samples.good(), {}
    of_one = [
        row for row in ROWS if row[0] == "plan" and len(row[1]) == len(row[2]) == 1 and row[2] != OK
    ]
    for _, (line,), (pattern,) in sorted(of_one, key=lambda row: -len(row[1][0].split(" =")[0])):
        path = line.partition(" = ")[0]
        if " = " in line and not any(other.startswith(path) for other in wrong):
            wrong[path] = line, pattern
            change(plan, line)
    Path("plan.json").write_text(json.dumps(plan))
    said = [each.removeprefix("plan.json: ") for each in problems_of("check", "plan.json")]
    assert len(said) == len(wrong) > 20
    for line, pattern in wrong.values():
        assert any(fits(pattern, each, line) for each in said), pattern
