"""`zorse schema`: the JSON schema of the plan file."""

import typer

from zorse_megatron.schema.plan.json_schema import json_schema_text


def schema() -> None:
    """Print the JSON schema of the plan file."""
    typer.echo(json_schema_text(), nl=False)
