"""A request to a run: the next plan, as a file in the directory of its status."""

from pathlib import Path

from zorse_megatron.files.read import read_input
from zorse_megatron.files.write import write_text
from zorse_megatron.schema.plan.plan import Plan
from zorse_megatron.schema.plan.plan_json import dump_plan

REQUEST_NAME = "next-plan.json"
_TAKEN_NAME = "next-plan.taken.json"


def make_request(directory: Path, plan: Plan) -> Path:
    """Ask the run that keeps its status there to go on under a plan; returns the file.

    Takes the place of a request that the run has not read yet. Raises OutputError.
    """
    return write_text(directory / REQUEST_NAME, dump_plan(plan))


def take_request(directory: Path) -> bytes | None:
    """What has been asked for since the last call, and take it away; None: nothing.

    b"" for what cannot be read, which is no plan.
    """
    taken = directory / _TAKEN_NAME
    try:
        # Renamed before it is read: a request that takes its place meanwhile is another one.
        (directory / REQUEST_NAME).rename(taken)
    except OSError:
        return None
    try:
        data = read_input(taken)
        taken.unlink()
    except OSError:
        return b""
    return data


def drop_request(directory: Path) -> bool:
    """Take away what an earlier run was asked for; whether there was anything."""
    return take_request(directory) is not None
