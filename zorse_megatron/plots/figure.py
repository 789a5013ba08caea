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


def save_figure(figure: Figure, path: Path) -> Path:
    """Write the figure as PNG and return its path."""
    picture = io.BytesIO()
    # No version of matplotlib in the file: equal figures are equal files.
    figure.savefig(picture, format="png", dpi=DOTS_PER_INCH, metadata={"Software": None})
    return write_bytes(path, picture.getvalue(), parents=True)
