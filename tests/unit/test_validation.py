"""Against whole training runs that others measured. docs/simulator.md states these errors."""

import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from statistics import fmean

import pytest

from scripts.import_profile import columns_of
from scripts.validation.measured_runs import RunRow, read_runs
from scripts.validation.sailor_runs import PARTS, RUNS, compare_runs, mean_absolute
from tests.measured import MEASURED, needs_measured
from zorse_megatron.errors import ProfileError

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "scripts.validation.sailor"]
ROW = "GPT-Neo-2.7,GH-96,4,2,2,4,0-15|16-33,1,64,2.29028,20011024384"
HEADER = ",".join(columns_of(RunRow))


def tables():
    return {name: (MEASURED / name).read_bytes() for name in (RUNS, *PARTS)}


@cache
def rows():
    return compare_runs(tables())


@needs_measured
def test_iteration_time():
    errors = [row.time_error for row in rows()]
    assert len(errors) == 25
    assert mean_absolute(errors) <= 0.06
    assert mean_absolute(errors) == pytest.approx(0.050, abs=0.0005)
    # Where no pipeline is involved nothing of the transfers can explain the error.
    pipelines = [row.time_error for row in rows() if len(row.run.entries) > 1]
    assert mean_absolute(pipelines) == pytest.approx(0.034, abs=0.0005)


@needs_measured
def test_peak_memory():
    errors = [row.memory_error for row in rows()]
    assert mean_absolute(errors) <= 0.08
    assert sorted(map(abs, errors))[-2] < 0.09  # all but one run


@needs_measured
@pytest.mark.parametrize(("gb_per_s", "error"), [(80, 0.062), (15, 0.056)])
def test_the_bound_does_not_hang_on_the_rate_of_the_rebuild(gb_per_s, error):
    found = compare_runs(tables(), rebuild_bytes_per_s=gb_per_s * 1e9)
    assert mean_absolute([row.time_error for row in found]) == pytest.approx(error, abs=0.0006)


@needs_measured
def test_the_table_in_the_documents_is_that_of_the_script(tmp_path):
    out = tmp_path / "errors.json"
    command = [*COMMAND, "--measured", str(MEASURED)]
    printed = subprocess.run(
        [*command, "--json", str(out)], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    content = json.loads(out.read_text())
    time_error, memory_error = (100 * content[f"{name}_error"] for name in ("time", "memory"))
    told = f"iteration time {time_error:.1f}%, peak memory {memory_error:.1f}%"
    assert f"mean absolute error: {told}" in printed
    assert content["time_error"] == pytest.approx(mean_absolute([r.time_error for r in rows()]))
    assert content["time_bias"] == pytest.approx(fmean(row.time_error for row in rows()))
    document = (ROOT / "docs" / "simulator.md").read_text()
    told = f"{time_error:.1f} % of the iteration time, {memory_error:.1f} % of the peak memory"
    assert f"Mean absolute error: **{told}**" in document
    for row in content["rows"]:
        cells = (
            f"| {row['model']} | {row['num_nodes']} | {row['layout']} | "
            f"{row['measured_iteration_s']:.3f} | {row['simulated_iteration_s']:.3f} | "
            f"{100 * row['time_error']:+.1f} % | {row['measured_memory_bytes'] / 1e9:.1f} | "
            f"{row['simulated_memory_bytes'] / 1e9:.1f} | {100 * row['memory_error']:+.1f} % |"
        )
        assert cells in document, cells


def test_a_run_as_a_plan():
    (run,) = read_runs("runs.csv", f"{HEADER}\n{ROW}\n".encode())
    plan = run.plan()
    assert run.layout == "PP 2 DP 2 TP 4, 32 x 1"
    assert (run.world_size, plan.world_size) == (16, 4), "one rank stands for each set of four"
    assert [chunk.layers for chunk in plan.chunks] == [(0, 15), (15, 32)]
    assert [replica.ranks[0] for group in plan.groups for replica in group.replicas] == [
        0,
        1,
        2,
        3,
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("model,gpu\nx,y\n", "num_nodes too"),
        (HEADER + "\n" + ROW.replace("GH-96,4", "GH-96,0") + "\n", "num_nodes"),
        (HEADER + "\n" + ROW.replace("16-33", "all") + "\n", "layers_per_stage"),
        (HEADER + "\n" + ROW.replace("0-15|", "") + "\n", "pipeline_stages"),
        (HEADER + "\n" + ROW.replace("0-15", "0-14") + "\n", "follow each other"),
        (HEADER + "\n" + ROW.replace(",64,", ",65,") + "\n", "a multiple of"),
        (HEADER + "\n" + ROW.replace("2.29028", "0") + "\n", "a time above 0"),
    ],
)
def test_tables_that_are_wrong(content, message):
    with pytest.raises(ProfileError, match=re.escape(message)):
        read_runs("runs.csv", content.encode())


@needs_measured
@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("GPT-Neo-2.7", "GPT-Neo-9", "times of GPT-Neo-9"),
        ("GH-96", "A10G", "links of A10G"),
        ("GH-96,4,", "GH-96,5,", "16 GPUs on 5 nodes"),
    ],
)
def test_runs_that_the_parts_do_not_fit(old, new, message):
    runs = (HEADER + "\n" + ROW.replace(old, new) + "\n").encode()
    with pytest.raises(ProfileError, match=message):
        compare_runs({**tables(), RUNS: runs})


def test_a_directory_without_the_tables(tmp_path):
    command = [*COMMAND, "--measured", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and RUNS in done.stderr and "Traceback" not in done.stderr
