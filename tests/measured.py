"""Public measurements, which the repository does not contain: they lie beside it, or not at all."""

from pathlib import Path

import pytest

from scripts.import_profile import Imported, import_tables

MEASURED = Path(__file__).parents[2] / "shared" / "measured"
TABLES = (
    "layer_latency.csv",
    "layer_latency_tp.csv",
    "model_memory_tp.csv",
    "link_bandwidth.csv",
)

needs_measured = pytest.mark.skipif(
    not MEASURED.is_dir(), reason="no ../shared/measured beside the repository"
)


def imported(*names: str) -> Imported:
    """Import tables of the shared directory."""
    tables = {name: (MEASURED / name).read_bytes() for name in names or TABLES}
    return import_tables(tables, origin="Zorse (MLSys 2026), Sailor (SOSP 2025)")
