"""Read the status of a run."""

from pathlib import Path

from zorse_megatron.errors import ZorseError
from zorse_megatron.schema.status.status import STATUS_NAME, STATUS_VERSION, Status
from zorse_megatron.schema.text.file_kind import FileKind
from zorse_megatron.schema.text.json_text import layout, read_json
from zorse_megatron.schema.text.strict import built, check_version, plain, read_file


class StatusError(ZorseError):
    """There is no status of a run, or it cannot be used."""


STATUS_FILE = FileKind(
    name="status",
    syntax="JSON",
    document="docs/rebalance.md",
    error=StatusError,
    root=Status,
)


def dump_status(status: Status) -> str:
    """Return the text of the file."""
    return layout(plain(status)) + "\n"


def load_status(directory: Path) -> Status:
    """Read what the run has last written there. Raises StatusError with every problem."""
    path = directory / STATUS_NAME if directory.is_dir() else directory
    value, problems = read_json(read_file(path, STATUS_FILE), str(path), STATUS_FILE)
    check_version(value, str(path), STATUS_FILE, STATUS_VERSION)
    status: Status = built(value, problems, STATUS_FILE, str(path), rules=lambda _: ())
    return status
