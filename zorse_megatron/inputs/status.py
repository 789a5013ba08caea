"""The status file of a run: who is slow, by how much, since when."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, ConfigDict
from pydantic.dataclasses import dataclass

from zorse_megatron.errors import ZorseError
from zorse_megatron.files.json_text import layout, read_json
from zorse_megatron.files.strict import FileKind, built, check_version, plain, read_file
from zorse_megatron.files.wording import one_line
from zorse_megatron.plan.plan import Count, Positive, PositiveFloat, Weight, refuse_non_integer

_CONFIG = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)

STATUS_VERSION = 1
STATUS_NAME = "status.json"
RUNNING_PLAN_NAME = "running-plan.json"
"""Beside it: the plan that the run is under."""


@dataclass(frozen=True, kw_only=True, config=_CONFIG)
class Shares:
    """Parts of a rank's iteration."""

    compute: Weight | None = None
    """Forwards and backwards."""
    waited: Weight | None = None
    """Waiting for messages of other ranks."""
    update: Weight | None = None
    """Reductions, optimizer step, gathers."""


@dataclass(frozen=True, kw_only=True, config=_CONFIG)
class RankStatus:
    """One rank."""

    rank: Count
    kind: str | None = None
    """Of its GPU, as in the plan."""
    group: Count
    replica: Count
    micro_batch_size: Positive
    num_microbatches: Count
    """Now."""
    micro_batch_s: PositiveFloat | None = None
    """Forward and backward of one through all chunks, without what they wait for."""
    planned_micro_batch_s: PositiveFloat | None = None
    slowdown: PositiveFloat | None = None
    """How many times as long as planned; if the plan does not say, as at first."""
    noise: Weight | None = None
    """Standard error of it, as a part of it."""
    since: Count | None = None
    """Iteration with which its present speed began."""
    shares: Shares


@dataclass(frozen=True, kw_only=True, config=_CONFIG)
class LinkStatus:
    """Messages between two ranks."""

    ranks: tuple[Count, Count]
    """The lower one first."""
    num_bytes: Positive
    """Of one message."""
    seconds: PositiveFloat
    """From its sender's handing it over to its arrival: the median, of the mean of both ways."""
    messages: Positive
    """That this rests on, in each way."""


@dataclass(frozen=True, kw_only=True, config=_CONFIG)
class Change:
    """Other counts of micro-batches."""

    iteration: Count
    """The first with them."""
    counts: tuple[tuple[Count, ...], ...]
    """Group -> replica -> micro-batches."""


def _one_line_if_any(text: object) -> object:
    """Errors have many lines, which no text of a file has."""
    return one_line(text) if isinstance(text, str) else text


@dataclass(frozen=True, kw_only=True, config=_CONFIG)
class Move:
    """Another plan was asked for."""

    iteration: Count
    """The last one under the plan before."""
    plan: str | None = None
    """Fingerprint of what was asked for; absent: it was no plan."""
    refused: Annotated[str | None, BeforeValidator(_one_line_if_any)] = None
    """Why the run stayed under its plan; absent: it went on under the other one."""


@dataclass(frozen=True, kw_only=True, config=_CONFIG)
class Status:
    """A run."""

    schema_version: Annotated[Literal[1], BeforeValidator(refuse_non_integer)]
    plan: str
    """Fingerprint of the plan file."""
    iteration: Count
    """The last one that is known."""
    written_s: PositiveFloat
    """When, in seconds since 1970."""
    iteration_s: PositiveFloat | None = None
    """Of the last ones, the median; from the first action of a list to its last."""
    tokens_per_s: PositiveFloat | None = None
    planned_iteration_s: PositiveFloat | None = None
    changes: tuple[Change, ...] = ()
    moves: tuple[Move, ...] = ()
    """Since the job started."""
    ended: bool = False
    """Whether the training is over, and nothing failed."""
    ranks: tuple[RankStatus, ...]
    links: tuple[LinkStatus, ...] = ()
    """Of which messages were waited for at both ends."""


# Read the status of a run.


class StatusError(ZorseError):
    """There is no status of a run, or it cannot be used."""


STATUS_FILE = FileKind(
    name="status",
    syntax="JSON",
    document="docs/elastic.md",
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
