"""What the command says about mirroring."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class MirrorRequest:
    """`--zorse-mirror EVERY` and `--zorse-mirror-overlap`."""

    every: int
    """Iterations from one copy to the next."""
    overlaps: bool
    """Whether the training goes on while a copy is sent and written."""
    training: tuple[str, ...]
    """The training command without our own flags: the plan may be another one at each start."""
