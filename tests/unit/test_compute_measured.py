"""How far the compute model is off, on public times. docs/simulator.md states these errors."""

import dataclasses
from collections import defaultdict
from functools import cache
from statistics import fmean, median

import pytest

from tests.measured import imported, needs_measured
from zorse_megatron.costs import analytic_compute
from zorse_megatron.costs.analytic_compute import AnalyticCompute
from zorse_megatron.costs.interface import off_by
from zorse_megatron.costs.measured_curves import fit_curve
from zorse_megatron.costs.profiled_compute import ProfiledCompute
from zorse_megatron.gpus.gpu import Dtype
from zorse_megatron.gpus.known_gpus import GPU_KINDS
from zorse_megatron.inputs.model import MODELS
from zorse_megatron.inputs.profile import Profile, Times

pytestmark = needs_measured

# The kinds of clusters A, B and C of the Zorse paper.
PAPER_KINDS = ("H100-NVL", "A100-80", "A100-40", "A10G", "V100-16", "T4")


@cache
def profile() -> Profile:
    """Single layers with their dtype, as the authors of Zorse measured them."""
    return imported("layer_latency.csv").profile


def model_of(times: Times):
    return dataclasses.replace(
        profile().model_named(times.model).shape(), seq_length=times.seq_length
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
    return [t for t in profile().times if t.dtype == dtype and t.gpu_kind in kinds]


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
    rest = tuple(times for times in profile().times if times is not left_out)
    return dataclasses.replace(profile(), times=rest)


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


def test_measured_points_are_returned():
    """Of what was measured nothing is lost but the points that are not believed."""
    differing = defaultdict(int)
    for times in series("float16", PAPER_KINDS):
        compute = ProfiledCompute(profile(), model_of(times), dtype="float16")
        assert compute.provenance(times.gpu_kind).basis == "measured"
        errors = errors_of(times, compute)
        differing[times.gpu_kind] += sum(abs(error) > 1e-9 for error in errors)
        columns = (times.forward_s, times.backward_s)
        replaced = [fit_curve(times.micro_batch_sizes, column)[1] for column in columns]
        assert sum(map(len, replaced)) == sum(abs(error) > 1e-9 for error in errors)
    assert differing["H100-NVL"] > 8


@pytest.mark.parametrize("model", ["llama-7b", "llama-13b", "llama-33b", "llama-65b"])
def test_the_h100_points_that_are_too_fast_are_not_used(model):
    shape = dataclasses.replace(MODELS[model], seq_length=4096)
    compute = ProfiledCompute(profile(), shape, dtype="float16")
    per_sample = [compute.layer("H100-NVL", size).forward_s / size for size in (1, 2, 3, 4)]
    assert per_sample[1] == pytest.approx(fmean([per_sample[0], per_sample[2]]), rel=0.03)
    (times,) = (
        each
        for each in series("float16", ["H100-NVL"])
        if each.model == model and each.part == "layer"
    )
    for column in (times.forward_s, times.backward_s):
        replaced = fit_curve(times.micro_batch_sizes, column)[1]
        assert [point.micro_batch_size for point in replaced] == [2]


def test_heads_against_those_that_sailor_measured():
    """A head without times of its own, from the layers of the same model.

    OPT-30 only: of its times it is certain that they are plain float32, as the profile says.
    """
    whole = imported().profile
    heads = [t for t in whole.times if t.part == "head" and t.model == "OPT-30"]
    rest = dataclasses.replace(whole, times=tuple(t for t in whole.times if t.part != "head"))
    errors = []
    for times in heads:
        model = dataclasses.replace(
            whole.model_named(times.model).shape(), seq_length=times.seq_length
        )
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


def test_steps_against_those_that_sailor_measured():
    """Adam in float32: 28 bytes per parameter at 0.8 of the memory bandwidth."""
    analytic = AnalyticCompute(MODELS["llama-7b"], dtype="float32")
    errors = [
        analytic.step_s(entry.gpu_kind, entry.num_parameters) / entry.update_s - 1
        for entry in imported().profile.updates
    ]
    assert len(errors) == 35
    assert summary(errors) == pytest.approx((0.135, 0.114), abs=0.0015)
