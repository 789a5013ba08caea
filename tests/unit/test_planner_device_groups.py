"""Device groups in another process: keys of what is costed there, too."""

import os
import pickle
import subprocess
import sys

import pytest

from zorse_megatron.planner.closed_form.device_groups import DeviceGroup, GpuClass

FRESH = """DeviceGroup((GpuClass(
    kind="T4", capacity_bytes=16, host_bytes=None, host_link_bytes_per_s=1e9, ranks=(0, 2)
),))"""
# Looks up there what was made here, and prints what it finds.
THERE = f"""
import pickle, sys
from zorse_megatron.planner.closed_form.device_groups import GpuClass, DeviceGroup
found, fresh = pickle.load(sys.stdin.buffer), {FRESH}
print(found == fresh, {{fresh: "there"}}.get(found), {{found: "there"}}.get(fresh), hash(found))
"""


@pytest.mark.slow
def test_a_device_group_from_another_process_is_found_as_a_key():
    device_group = eval(FRESH, {"DeviceGroup": DeviceGroup, "GpuClass": GpuClass})
    here = hash(device_group)  # kept from now on
    other_seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    done = subprocess.run(
        [sys.executable, "-c", THERE],
        input=pickle.dumps(device_group),
        env={**os.environ, "PYTHONHASHSEED": other_seed},
        stdout=subprocess.PIPE,
        check=True,
    )
    *answers, there = done.stdout.decode().split()
    assert answers == ["True", "there", "there"]
    assert int(there) != here, "both processes hash alike, so nothing was shown"
