"""A request to a run: the next plan, as a file in the directory of its status."""

from pathlib import Path

from zorse_megatron.files.read import read_input
from zorse_megatron.files.write import write_text
from zorse_megatron.schema.plan.plan import Plan
from zorse_megatron.schema.plan.plan_json import dump_plan

REQUEST_NAME = "next-plan.json"


def make_request(directory: Path, plan: Plan) -> Path:
    """Ask the run that keeps its status there to go on under a plan; returns the file.

    Takes the place of a request that the run has not read yet. Raises OutputError.
    """
    return write_text(directory / REQUEST_NAME, dump_plan(plan))


def take_request(directory: Path) -> bytes | None:
    """What has been asked for since the last call, and take it away; None: nothing."""
    path = directory / REQUEST_NAME
    try:
        data = read_input(path)
        path.unlink()
    except OSError:
        return None
    return data
