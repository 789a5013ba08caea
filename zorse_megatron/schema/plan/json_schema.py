"""The JSON schema of the plan file, for editors and for programs in other languages.

It says what the classes in `plan.py` say: names, types, single values. The rules that tie values
together are not in it; `zorse check` has those.
"""

from typing import Any

from pydantic import TypeAdapter

from zorse_megatron.schema.plan.plan import Plan
from zorse_megatron.schema.text.json_text import layout


def json_schema() -> dict[str, Any]:
    """Return the schema, JSON Schema draft 2020-12."""
    schema = TypeAdapter(Plan).json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def json_schema_text() -> str:
    """Return the text of `plan.schema.json`."""
    return layout(json_schema()) + "\n"
