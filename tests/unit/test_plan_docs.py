"""docs/plan-file.md says what the code does."""

import dataclasses
import re
from pathlib import Path
from typing import get_args, get_origin, get_type_hints

import pytest
from typer.testing import CliRunner

from zorse_megatron.cli.main import app
from zorse_megatron.schema.plan.plan import Plan
from zorse_megatron.schema.plan.plan_json import parse_plan

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "plan-file.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```json\n(.*?)```", TEXT, re.DOTALL)
OUTPUTS = re.findall(r"```\n(plan\.json.*?)```", TEXT, re.DOTALL)


def test_there_is_an_example():
    assert EXAMPLES
    assert len(OUTPUTS) == 2


@pytest.mark.parametrize("text", EXAMPLES)
def test_examples_load(text):
    parse_plan(text.encode())


def check_output(directory, text):
    (directory / "plan.json").write_text(text, encoding="utf-8")
    return CliRunner().invoke(app, ["check", "plan.json"]).stdout


def test_output_of_check_is_as_shown(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert check_output(tmp_path, EXAMPLES[0]) == OUTPUTS[0]


def test_problems_are_as_shown(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    spoilt = EXAMPLES[0].replace("[6, 9]", "[6, 8]")
    spoilt = spoilt.replace('"num_microbatches": 8', '"num_microbatches": 7')
    assert check_output(tmp_path, spoilt) == OUTPUTS[1]


def documented_fields():
    """The names in the first column of the table under each heading."""
    tables = {}
    for section in re.split(r"^### ", TEXT, flags=re.MULTILINE)[1:]:
        heading = section.splitlines()[0]
        fields = re.findall(r"^\| `(\w+)` \|.*\| (yes|no) \|", section, re.MULTILINE)
        tables |= dict.fromkeys(re.findall(r"`(.+?)`", heading) or [heading], fields)
    return tables


def real_fields():
    tables = {}

    def visit(owner, path):
        rows = []
        for field in dataclasses.fields(owner):
            default = (field.default, field.default_factory)
            required = default == (dataclasses.MISSING, dataclasses.MISSING)
            rows.append((field.name, "yes" if required else "no"))
            hint = get_type_hints(owner)[field.name]
            inner = [part for each in get_args(hint) for part in (each, *get_args(each))]
            for part in (hint, *inner):
                if dataclasses.is_dataclass(part):
                    is_list = tuple in map(get_origin, (hint, *get_args(hint)))
                    visit(part, f"{path}{field.name}" + ("[]" if is_list else "") + ".")
        tables[path.removesuffix(".") or "Plan (top level)"] = rows

    visit(Plan, "")
    return tables


def test_every_field_is_documented_where_it_belongs():
    documented, real = documented_fields(), real_fields()
    assert len(real) == 14
    assert documented == real


def test_commands_exist():
    named = set(re.findall(r"zorse (\w+)", TEXT))
    assert named <= {command.callback.__name__ for command in app.registered_commands}


def test_links_lead_somewhere():
    links = re.findall(r"\]\(([^)#]+)\)", TEXT)
    assert links
    assert all((DOCS / link).is_file() for link in links)
