"""What all figures share: a canvas without a window, and one way to save it."""

import io
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from zorse_megatron.files.write import write_bytes

DOTS_PER_INCH = 150
TEXT = "#222222"
FAINT = "#6b6b6b"


def new_figure(*, width_inches: float, height_inches: float) -> Figure:
    """Return an empty figure that needs no display and leaves matplotlib's global state alone."""
    figure = Figure(figsize=(width_inches, height_inches), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Figure, path: Path, *, description: str | None = None) -> Path:
    """Write the figure as PNG and return its path; `description` goes into the file as text."""
    picture = io.BytesIO()
    # No version of matplotlib in the file: equal figures are equal files.
    said = {"Software": None, **({"Description": description} if description else {})}
    figure.savefig(picture, format="png", dpi=DOTS_PER_INCH, metadata=said)
    return write_bytes(path, picture.getvalue(), parents=True)
