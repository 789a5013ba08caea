"""Against what others measured; docs/simulator.md states these errors."""

import dataclasses
import json
import re
from collections import defaultdict
from functools import cache
from pathlib import Path
from statistics import fmean, median

import pytest

from scripts.import_profile import columns_of
from scripts.validation import sailor_runs
from scripts.validation.measured_memory import MeasuredMemory
from scripts.validation.measured_runs import RunRow, read_runs
from scripts.validation.sailor_runs import PARTS, RUNS, compare_runs, mean_absolute
from tests.measured import MEASURED, imported, needs_measured
from tests.unit.in_process import run_program
from zorse_megatron.costs import analytic_compute
from zorse_megatron.costs.analytic_compute import AnalyticCompute
from zorse_megatron.costs.interface import MemoryCost, off_by
from zorse_megatron.costs.measured_curves import fit_curve
from zorse_megatron.costs.model_memory import Precision
from zorse_megatron.costs.profiled_compute import ProfiledCompute
from zorse_megatron.errors import ProfileError
from zorse_megatron.gpus.gpu import Dtype
from zorse_megatron.gpus.known_gpus import GPU_KINDS
from zorse_megatron.inputs.model import MODELS
from zorse_megatron.inputs.profile import PartMemory, Profile, Source, Times

# Layers.

# The kinds of clusters A, B and C of the Zorse paper.
PAPER_KINDS = ("H100-NVL", "A100-80", "A100-40", "A10G", "V100-16", "T4")


@cache
def layer_profile() -> Profile:
    """Single layers with their dtype, as the authors of Zorse measured them."""
    return imported("layer_latency.csv").profile


def model_of(times: Times):
    return dataclasses.replace(
        layer_profile().model_named(times.model), seq_length=times.seq_length
    )


def errors_of(times: Times, compute) -> list[float]:
    """Relative errors of forward and backward at every measured point."""
    errors = []
    columns = zip(times.micro_batch_sizes, times.forward_s, times.backward_s, strict=True)
    for size, forward_s, backward_s in columns:
        found = compute.layer(times.gpu_kind, size)
        errors += [found.forward_s / forward_s - 1, found.backward_s / backward_s - 1]
    return errors


def summary(errors: list[float]) -> tuple[float, float]:
    """Mean and median of the absolute errors."""
    absolute = list(map(abs, errors))
    return fmean(absolute), median(absolute)


def series(dtype: Dtype, kinds=tuple(GPU_KINDS)):
    return [t for t in layer_profile().times if t.dtype == dtype and t.gpu_kind in kinds]


@needs_measured
@pytest.mark.parametrize(
    ("dtype", "kinds", "mean", "middle"),
    [
        ("float16", tuple(GPU_KINDS), 0.062, 0.033),
        ("float16", PAPER_KINDS, 0.046, 0.025),
        ("float32", tuple(GPU_KINDS), 0.109, 0.044),
    ],
)
def test_analytic(dtype, kinds, mean, middle):
    errors = []
    for times in series(dtype, kinds):
        errors += errors_of(times, AnalyticCompute(model_of(times), dtype=dtype))
    assert len(errors) > 1000
    assert summary(errors) == pytest.approx((mean, middle), abs=0.0015)


def both_passes(times: Times, compute) -> list[float]:
    """Relative errors of forward and backward together at every measured point."""
    columns = zip(times.micro_batch_sizes, times.forward_s, times.backward_s, strict=True)
    found = ((compute.layer(times.gpu_kind, size), f + b) for size, f, b in columns)
    return [(each.forward_s + each.backward_s) / both_s - 1 for each, both_s in found]


@needs_measured
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("basis", ["scaled", "analytic", "uncalibrated"])
def test_nine_of_ten_layer_times_are_off_by_no_more_than_is_said(basis, dtype, monkeypatch):
    """Of GPUs that nobody measured: all that were, with the shares of none."""
    if basis == "uncalibrated":
        monkeypatch.setattr(analytic_compute, "_SIXTEEN_BIT", {})
        monkeypatch.setattr(analytic_compute, "_FLOAT32", {})
    errors = []
    for times in series(dtype):
        model = model_of(times)
        if basis == "scaled":
            compute = ProfiledCompute(without(times), model, dtype=dtype)
        else:
            compute = AnalyticCompute(model, dtype=dtype)
        provenance = compute.provenance(times.gpu_kind)
        if basis != "scaled" or provenance.basis == "scaled":
            errors += both_passes(times, compute)
    assert len(errors) >= 1000
    worst_of_nine = sorted(map(abs, errors))[int(0.9 * len(errors))]
    assert provenance.is_calibrated == (basis != "uncalibrated")
    said = off_by(
        "scaled" if basis == "scaled" else "analytic",
        sixteen_bit=dtype == "float16",
        is_calibrated=basis != "uncalibrated",
    )
    assert worst_of_nine == pytest.approx(said, abs=0.005)


def without(left_out: Times) -> Profile:
    rest = tuple(times for times in layer_profile().times if times is not left_out)
    return dataclasses.replace(layer_profile(), times=rest)


@needs_measured
@pytest.mark.parametrize(
    ("kinds", "mean", "middle"), [(tuple(GPU_KINDS), 0.051, 0.022), (PAPER_KINDS, 0.042, 0.018)]
)
def test_scaled_from_relatives(kinds, mean, middle):
    """Each series in turn is left out and priced by the others of its kind of GPU."""
    errors = []
    for times in series("float16", kinds):
        compute = ProfiledCompute(without(times), model_of(times), dtype="float16")
        if compute.provenance(times.gpu_kind).basis == "scaled":
            errors += errors_of(times, compute)
    assert len(errors) > 1000
    assert summary(errors) == pytest.approx((mean, middle), abs=0.0015)


@needs_measured
def test_points_left_out_are_found_again():
    """Of each series every second point is left out and read off the curve through the others."""
    errors = []
    for times in series("float16", PAPER_KINDS):
        sizes = times.micro_batch_sizes
        for column in (times.forward_s, times.backward_s):
            curve, _ = fit_curve(sizes[::2], column[::2])
            pairs = zip(sizes[1::2], column[1::2], strict=True)
            errors += [curve.at(size) / seconds - 1 for size, seconds in pairs]
    assert len(errors) > 500
    assert summary(errors) == pytest.approx((0.017, 0.007), abs=0.0015)


@needs_measured
def test_measured_points_are_returned():
    """Of what was measured nothing is lost but the points that are not believed."""
    differing = defaultdict(int)
    for times in series("float16", PAPER_KINDS):
        compute = ProfiledCompute(layer_profile(), model_of(times), dtype="float16")
        assert compute.provenance(times.gpu_kind).basis == "measured"
        errors = errors_of(times, compute)
        differing[times.gpu_kind] += sum(abs(error) > 1e-9 for error in errors)
        columns = (times.forward_s, times.backward_s)
        replaced = [fit_curve(times.micro_batch_sizes, column)[1] for column in columns]
        assert sum(map(len, replaced)) == sum(abs(error) > 1e-9 for error in errors)
    assert differing["H100-NVL"] > 8


@needs_measured
@pytest.mark.parametrize("model", ["llama-7b", "llama-13b", "llama-33b", "llama-65b"])
def test_the_h100_points_that_are_too_fast_are_not_used(model):
    shape = dataclasses.replace(MODELS[model], seq_length=4096)
    compute = ProfiledCompute(layer_profile(), shape, dtype="float16")
    per_sample = [compute.layer("H100-NVL", size).forward_s / size for size in (1, 2, 3, 4)]
    assert per_sample[1] == pytest.approx(fmean([per_sample[0], per_sample[2]]), rel=0.03)
    (times,) = (
        each
        for each in series("float16", ["H100-NVL"])
        if (each.model, each.part, each.seq_length) == (model, "layer", 4096)
    )
    for column in (times.forward_s, times.backward_s):
        replaced = fit_curve(times.micro_batch_sizes, column)[1]
        assert [point.micro_batch_size for point in replaced] == [2]


@needs_measured
def test_heads_against_those_that_sailor_measured():
    """A head without times of its own, from the layers of the same model.

    OPT-30 only: of its times it is certain that they are plain float32, as the layer_profile says.
    """
    whole = imported().profile
    heads = [t for t in whole.times if t.part == "head" and t.model == "OPT-30"]
    rest = dataclasses.replace(whole, times=tuple(t for t in whole.times if t.part != "head"))
    errors = []
    for times in heads:
        model = dataclasses.replace(whole.model_named(times.model), seq_length=times.seq_length)
        compute = ProfiledCompute(
            rest, model, dtype="float32", tensor_parallel=times.tensor_parallel
        )
        columns = zip(times.micro_batch_sizes, times.forward_s, times.backward_s, strict=True)
        for size, forward_s, backward_s in columns:
            found = compute.head(times.gpu_kind, size)
            errors.append((found.forward_s + found.backward_s) / (forward_s + backward_s) - 1)
    assert len(errors) == 17
    assert summary(errors) == pytest.approx((0.04, 0.03), abs=0.015)
    assert max(map(abs, errors)) < 0.11


@needs_measured
def test_steps_against_those_that_sailor_measured():
    """Adam in float32: 28 bytes per parameter at 0.8 of the memory bandwidth."""
    analytic = AnalyticCompute(MODELS["llama-7b"], dtype="float32")
    errors = [
        analytic.step_s(entry.gpu_kind, entry.num_parameters) / entry.update_s - 1
        for entry in imported().profile.updates
    ]
    assert len(errors) == 35
    assert summary(errors) == pytest.approx((0.135, 0.114), abs=0.0015)


# Whole runs.

ROOT = Path(__file__).parents[2]
SCRIPT = "scripts.validation.sailor"
ROW = "GPT-Neo-2.7,GH-96,4,2,2,4,0-15|16-33,1,64,2.29028,20011024384"
HEADER = ",".join(columns_of(RunRow))


def tables():
    return {name: (MEASURED / name).read_bytes() for name in (RUNS, *PARTS)}


@cache
def rows():
    return compare_runs(tables())


@pytest.mark.slow
@needs_measured
def test_iteration_time():
    errors = [row.time_error for row in rows()]
    assert len(errors) == 25
    assert mean_absolute(errors) <= 0.06
    assert mean_absolute(errors) == pytest.approx(0.050, abs=0.0005)
    # Where no pipeline is involved nothing of the transfers can explain the error.
    pipelines = [row.time_error for row in rows() if len(row.run.entries) > 1]
    assert mean_absolute(pipelines) == pytest.approx(0.034, abs=0.0005)


@pytest.mark.slow
@needs_measured
def test_peak_memory():
    errors = [row.memory_error for row in rows()]
    assert mean_absolute(errors) <= 0.08
    assert sorted(map(abs, errors))[-2] < 0.09  # all but one run


@pytest.mark.slow
@needs_measured
@pytest.mark.parametrize(("gb_per_s", "error"), [(80, 0.062), (15, 0.056)])
def test_the_bound_does_not_hang_on_the_rate_of_the_rebuild(gb_per_s, error):
    found = compare_runs(tables(), rebuild_bytes_per_s=gb_per_s * 1e9)
    assert mean_absolute([row.time_error for row in found]) == pytest.approx(error, abs=0.0006)


def _in_families(runs):
    """Rows as the document has them -> their runs."""
    families = {}
    for run in runs:
        pipeline = "without" if run["layout"].startswith("PP 1 ") else "with a pipeline"
        families.setdefault(f"{run['model']}, {pipeline}", []).append(run)
    return families


def _mean_and_range(errors):
    return f"{mean_absolute(errors):.1f} % | {min(errors):+.1f} to {max(errors):+.1f} %"


@pytest.mark.slow
@needs_measured
def test_the_table_in_the_documents_is_that_of_the_script(tmp_path, monkeypatch):
    def compared(given, *, rebuild_bytes_per_s):
        assert given == tables() and rebuild_bytes_per_s is None
        return rows()  # as `compare_runs` finds them

    monkeypatch.setattr(sailor_runs, "compare_runs", compared)
    out = tmp_path / "errors.json"
    status, printed, _ = run_program(SCRIPT, "--measured", MEASURED, "--json", out)
    assert status == 0
    content = json.loads(out.read_text())
    time_error, memory_error = (100 * content[f"{name}_error"] for name in ("time", "memory"))
    told = f"iteration time {time_error:.1f}%, peak memory {memory_error:.1f}%"
    assert f"mean absolute error: {told}" in printed
    assert content["time_error"] == pytest.approx(mean_absolute([r.time_error for r in rows()]))
    assert content["time_bias"] == pytest.approx(fmean(row.time_error for row in rows()))
    document = (ROOT / "docs" / "simulator.md").read_text()
    told = f"{time_error:.1f} % of the iteration time, {memory_error:.1f} % of the peak memory"
    assert f"Mean absolute error: **{told}**" in document
    for name, runs in _in_families(content["rows"]).items():
        nodes = [run["num_nodes"] for run in runs]
        cells = f"| {name} | {len(runs)} | {min(nodes)} to {max(nodes)} | " + " | ".join(
            _mean_and_range([100 * run[f"{what}_error"] for run in runs])
            for what in ("time", "memory")
        )
        assert f"{cells} |" in document, cells


@pytest.mark.slow
def test_a_run_as_a_plan():
    (run,) = read_runs("runs.csv", f"{HEADER}\n{ROW}\n".encode())
    plan = run.plan()
    assert run.layout == "PP 2 DP 2 TP 4, 32 x 1"
    assert (run.world_size, plan.world_size) == (16, 4), "one rank stands for each TP group of four"
    assert [chunk.layers for chunk in plan.chunks] == [(0, 15), (15, 32)]
    assert [replica.ranks[0] for group in plan.groups for replica in group.replicas] == [
        0,
        1,
        2,
        3,
    ]


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_directory_without_the_tables(tmp_path):
    ended = run_program(SCRIPT, "--measured", tmp_path)
    assert ended.status == 1 and RUNS in ended.stderr


# Memory.

PRECISION = Precision(parameter_bytes=4, gradient_bytes=2, state_bytes=8)


def memory_profile(*parts: str) -> Profile:
    return Profile(
        schema_version=1,
        sources=(Source(name="table", kind="measured"),),
        memory=tuple(
            PartMemory(
                part=part,
                model="m",
                seq_length=8,
                tensor_parallel=2,
                source="table",
                parameters=100 * number,
                activation_elements=10 * number,
                output_elements=number,
            )
            for number, part in enumerate(parts, 1)
        ),
    )


def test_what_was_measured():
    parts = memory_profile("embedding", "layer", "head")
    memory: MemoryCost = MeasuredMemory.of(
        parts, "m", precision=PRECISION, element_bytes=4, tensor_parallel=2
    )
    assert memory.embedding_parameters() == 100
    assert memory.layer_parameters() == 200
    assert memory.head_parameters(tied_on_same_rank=False) == 300
    bytes_of = (memory.parameter_bytes, memory.gradient_bytes, memory.state_bytes)
    assert [size(10) for size in bytes_of] == [40, 20, 80]
    assert memory.activation_bytes(3, "none") == 3 * 20 * 4
    assert memory.head_bytes(3) == 3 * 30 * 4
    assert memory.boundary_bytes(3) == 3 * 1 * 4


def test_what_was_not():
    with pytest.raises(LookupError, match="embedding and the head of m"):
        MeasuredMemory.of(
            memory_profile("layer"), "m", precision=PRECISION, element_bytes=4, tensor_parallel=2
        )
    parts = memory_profile("embedding", "layer", "head")
    with pytest.raises(LookupError, match="tensor parallel 1"):
        MeasuredMemory.of(parts, "m", precision=PRECISION, element_bytes=4)
    memory = MeasuredMemory.of(parts, "m", precision=PRECISION, element_bytes=4, tensor_parallel=2)
    with pytest.raises(LookupError, match="kept whole"):
        memory.activation_bytes(1, "full")
    with pytest.raises(LookupError, match="tied"):
        memory.head_parameters(tied_on_same_rank=True)
