"""What the strict readers need to know of a kind of file: its class, its name, its document."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from zorse_megatron.errors import ZorseError


@dataclass(frozen=True, kw_only=True)
class FileKind:
    """A kind of file that people or programs hand to us."""

    name: str
    """In messages: "plan"."""
    syntax: str
    """JSON or YAML."""
    document: str
    """Where its fields are described."""
    error: type[ZorseError]
    """What is raised for a file that cannot be used."""
    root: Any
    """The class of its top level."""
    removed: Mapping[str, str] = field(default_factory=dict)
    """Key that files may still have -> what to do now."""

    @property
    def with_article(self) -> str:
        """As a message says it: "a plan"."""
        return f"{'an' if self.name[0] in 'aeiou' else 'a'} {self.name}"

    @property
    def see(self) -> str:
        """A remedy of last resort."""
        return f"{self.document} describes every field."
