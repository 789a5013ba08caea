"""One page about a plan that needs no other file: pictures are in it, nothing is loaded."""

from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files

from jinja2 import Environment, StrictUndefined


@dataclass(frozen=True, kw_only=True)
class Card:
    """A number that is seen first."""

    label: str
    value: str
    note: str


@dataclass(frozen=True, kw_only=True)
class StrategyRow:
    """Who takes how long; `reason`: why there is no number."""

    name: str
    layout: str
    iteration: str = ""
    tokens: str = ""
    percent: float = 0.0
    """Length of the bar."""
    reason: str = ""
    is_ours: bool = False


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A PNG with what it shows."""

    title: str
    hint: str
    png: bytes

    @property
    def base64(self) -> str:
        """As a data URI has it."""
        return b64encode(self.png).decode()


@dataclass(frozen=True, kw_only=True)
class ReplanRow:
    """What another search found."""

    what: str
    iteration: str
    gain: str


@dataclass(frozen=True, kw_only=True)
class PlanPage:
    """Everything on the page, as text."""

    title: str
    subtitle: str
    cards: Sequence[Card]
    contest: Sequence[StrategyRow]
    plan_line: str
    group_headings: Sequence[str]
    groups: Sequence[Sequence[str]]
    reasons: Sequence[str]
    pictures: Sequence[Picture]
    replans: Sequence[ReplanRow]
    no_replans: str
    """Why there are none."""
    rejected: Sequence[tuple[str, str]]
    considered: str
    notes: Sequence[str]
    footer: str

    def html(self) -> str:
        """Return the page; all texts are escaped."""
        template = files("zorse_megatron.plots").joinpath("plan_page.html.j2").read_text("utf-8")
        environment = Environment(autoescape=True, undefined=StrictUndefined)
        return environment.from_string(template).render(page=self) + "\n"
