"""Teams in another process: keys of what is priced there, too."""

import os
import pickle
import subprocess
import sys

from zorse_megatron.planner.closed_form.device_groups import Cell, Team

FRESH = """Team((Cell(
    kind="T4", capacity_bytes=16, host_bytes=None, host_link_bytes_per_s=1e9, ranks=(0, 2)
),))"""
# Looks up there what was made here, and prints what it finds.
THERE = f"""
import pickle, sys
from zorse_megatron.planner.closed_form.device_groups import Cell, Team
found, fresh = pickle.load(sys.stdin.buffer), {FRESH}
print(found == fresh, {{fresh: "there"}}.get(found), {{found: "there"}}.get(fresh), hash(found))
"""


def test_a_team_from_another_process_is_found_as_a_key():
    team = eval(FRESH, {"Team": Team, "Cell": Cell})
    here = hash(team)  # kept from now on
    other_seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    done = subprocess.run(
        [sys.executable, "-c", THERE],
        input=pickle.dumps(team),
        env={**os.environ, "PYTHONHASHSEED": other_seed},
        stdout=subprocess.PIPE,
        check=True,
    )
    *answers, there = done.stdout.decode().split()
    assert answers == ["True", "there", "there"]
    assert int(there) != here, "both processes hash alike, so nothing was shown"
