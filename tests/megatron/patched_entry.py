"""`$ZORSE_TEST_SCRIPT` as `python SCRIPT.py` runs it, recorded: for a script with our patch."""

import os
import runpy
import sys
from pathlib import Path
from unittest.mock import patch

from tests.megatron import recording_entry


def run_script(setup: None = None) -> None:
    """In place of `main`; a script sets its ranks up itself."""
    assert setup is None
    script = os.environ["ZORSE_TEST_SCRIPT"]
    sys.argv[0] = script
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    with patch.object(recording_entry, "main", run_script):
        recording_entry.record()
