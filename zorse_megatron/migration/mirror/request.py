"""What the command says about mirroring."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class MirrorRequest:
    """`--zorse-mirror EVERY`."""

    every: int
    """Iterations from one copy to the next."""
    training: tuple[str, ...]
    """The training command without our own flags: the plan may be another one at each start."""
