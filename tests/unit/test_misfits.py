"""Where nothing fits, the true cause is told, and what would fit; host memory always."""

import dataclasses
import re
from types import SimpleNamespace

import pytest

from zorse_megatron.cli.commands import plan as plan_module
from zorse_megatron.cli.console import failure_as_json
from zorse_megatron.cli.workload import workload_of
from zorse_megatron.cli.workload_costs import costs_of_workload
from zorse_megatron.inputs.cluster_yaml import parse_cluster
from zorse_megatron.inputs.model import MODELS
from zorse_megatron.plan.plan_file import save_plan
from zorse_megatron.planner.explain import explain
from zorse_megatron.planner.find_plan import find_plan
from zorse_megatron.planner.inputs.search_inputs import SearchSpace, make_inputs
from zorse_megatron.planner.outcome import NoPlanError
from zorse_megatron.planner.shortage import fits_problem, fitting, no_plan, what_fits
from zorse_megatron.planner.simulate_plan import host_needs
from zorse_megatron.simulate.result import host_bytes

CLUSTER = """
gpu_kinds:
  - {name: small, like: T4, memory: MEMORY}
nodes:
  - {name: one, gpus: 2 x small, host_memory: HOST}
"""
MODEL = dataclasses.replace(MODELS["llama-1b"], seq_length=512, num_layers=8)
GIB = 2**30
QUICK = SearchSpace(schedules=("1f1b",), split_backward=False)


def small(*, memory="16GB", host="64GiB", model=MODEL, batch=4):
    cluster = CLUSTER.replace("MEMORY", memory).replace("HOST", host)
    return make_inputs(
        parse_cluster(cluster.encode()),
        model,
        None,
        global_batch_size=batch,
        dtype="float16",
        space=QUICK,
    )


def test_host_memory_is_told_as_host_memory():
    """With optimizer state in the host a plan fits; without it the GPUs are too small."""
    fits = fitting(small(memory="4GB"))
    assert fits is not None and fits.plan.groups[0].offload.optimizer_state
    needed = sum(host_bytes(fits.result, rank).get("optimizer state", 0) for rank in (0, 1))
    assert needed > 1.2 * GIB
    error = no_plan(small(memory="4GB", host="1GiB"))
    (problem,) = error.problems
    assert problem.where == "host memory of node one"
    assert problem.found == "1.00 GiB"
    assert f"{needed / GIB:.1f} GiB for what has to wait there (optimizer state" in problem.expected
    with pytest.raises(NoPlanError, match="host memory of node one"):
        find_plan(small(memory="4GB", host="1GiB"))


def test_host_memory_is_counted_in_pinned_blocks():
    """As torch's allocator keeps them: two moments and the main parameters of each chunk."""
    fits = fitting(small(memory="4GB"))
    held = {0: 0, 1: 0}
    for rank in held:
        sizes = fits.result.timeline.sizes
        for chunk in sizes.chunks(rank):
            block = 1
            while block < 4 * sizes.shards[chunk][rank]:
                block *= 2
            held[rank] += 3 * block
    assert {rank: host_bytes(fits.result, rank) for rank in held} == {
        rank: {"optimizer state": num_bytes} for rank, num_bytes in held.items()
    }
    (need,) = host_needs(small(memory="4GB"), fits.result)
    assert need.num_bytes == sum(held.values())


def test_a_host_that_lacks_what_rounding_takes_is_not_planned_with():
    """12 bytes of state for each parameter would just fit; the blocks do not."""
    state = 12 * MODEL.num_parameters
    enough = host_needs(small(memory="4GB"), fitting(small(memory="4GB")).result)[0].num_bytes
    assert enough > 1.1 * state
    fits = fitting(small(memory="4GB", host=f"{1.05 * state / 1e9:.3f}GB"))
    assert fits is None
    assert fitting(small(memory="4GB", host=f"{1.02 * enough / 1e9:.3f}GB")) is not None


def test_the_total_is_told_by_category():
    inputs = small(memory="1GB", host="1GiB")
    gpu, total = no_plan(inputs).problems
    assert gpu.where.startswith("GPU memory of small (2 GPUs")
    assert total.where == "memory of all 2 GPUs together"
    assert total.found == f"{sum(inputs.capacities_bytes) / GIB:.1f} GiB"
    whole, _, parts = total.expected.partition(" GiB for that plan: ")
    rows = dict(part.rsplit(" ", 1) for part in parts.split(", "))
    assert {"parameters", "gradients", "activations", "logits"} <= set(rows)
    assert sum(map(float, rows.values())) == pytest.approx(float(whole), abs=0.05 * len(rows))
    # Parameters and gradients of what each GPU holds: 6 bytes in all.
    held = sum(map(float, (rows["parameters"], rows["gradients"])))
    assert held >= 0.95 * 6 * MODEL.num_parameters / GIB


def test_what_would_fit_fits_and_the_asked_does_not():
    asked = dataclasses.replace(MODEL, seq_length=32768)

    def make(model, batch):
        return small(memory="7GB", host="1GiB", model=model, batch=batch)

    assert fitting(make(asked, 4)) is None
    found = what_fits(make, asked, 4)
    assert found.sequence_length is not None and 512 <= found.sequence_length < 32768
    shorter = dataclasses.replace(asked, seq_length=found.sequence_length)
    plan = find_plan(make(shorter, 4))  # raises where nothing fits
    assert plan.peak_memory_fraction <= 1
    longer = dataclasses.replace(asked, seq_length=found.sequence_length + 32768 // 64)
    assert fitting(make(longer, 4)) is None
    problem = fits_problem(found, asked, 4)
    assert f"sequences of at most {found.sequence_length} tokens" in problem.expected
    if found.num_layers is None:
        assert "layers" not in problem.expected
    else:
        fewer = dataclasses.replace(asked, num_layers=found.num_layers)
        assert fitting(make(fewer, 4)) is not None


def test_why_nothing_smaller_fits_is_told():
    """With what is said to be missing of the least that was tried, that fits."""

    def make(model, batch, memory="2GB"):
        return small(memory=memory, host="1GiB", model=model, batch=batch)

    found = what_fits(make, MODEL, 4)
    assert found.sequence_length is None and found.global_batch_size is None
    assert len(found.reasons) == 2 + (found.num_layers is None)
    told = str(fits_problem(found, MODEL, 4))
    least = {"a sequence of 8 tokens": ({"seq_length": 8}, 4), "a batch of 1": ({}, 1)}
    for words, (fields, batch) in least.items():
        (gib,) = re.findall(
            rf"ot even {words} fits: ([\d.]+) GiB more is needed on each small", told
        )
        model = dataclasses.replace(MODEL, **fields)
        assert fitting(make(model, batch)) is None
        assert fitting(make(model, batch, f"{2e9 + float(gib) * GIB / 0.95:.0f} B")) is not None


def test_the_least_there_is_has_nothing_below_it():
    found = what_fits(lambda m, b: small(memory="2GB", host="1GiB", model=m, batch=b), MODEL, 1)
    assert "a batch of 1 is the least there is" in found.reasons


def test_amounts_are_told_in_one_unit_and_to_the_byte_in_json():
    error = no_plan(small(memory="1GB", host="1GiB"))
    missing, told = error.problems[0].expected, failure_as_json(error)
    assert "bytes" not in missing
    each, total = map(float, re.findall(r"([\d.]+) GiB", missing))
    assert told["gpu_kinds"] == ["small"] and told["missing_bytes"] == 2 * told["bytes_per_gpu"]
    for shown, exact in ((each, told["bytes_per_gpu"]), (total, told["missing_bytes"])):
        assert 0 <= shown * GIB - exact < 0.01 * GIB
    assert (
        failure_as_json(error.with_problem(error.problems[0]))["missing_bytes"]
        == 2 * (told["bytes_per_gpu"])
    )


@pytest.mark.parametrize(
    ("strategy", "most", "found"),
    [("cephalo", 128, "the strategy cephalo"), ("zorse", 1, "2 GPUs")],
)
def test_what_was_not_looked_for_is_told(strategy, most, found, monkeypatch):
    monkeypatch.setattr(plan_module, "_SAY_WHAT_FITS_UP_TO_RANKS", most)
    inputs = small(memory="1GB", host="1GiB")
    prices = SimpleNamespace(inputs=inputs, workload=SimpleNamespace(model=MODEL))
    problem = plan_module._what_fits(prices, strategy)
    assert (problem.where, problem.found) == ("what would fit", found)


def test_what_fits_is_priced_as_the_command_computes():
    """With dropout and attention as the flags say."""
    flags = "--num-layers 8 --hidden-size 256 --num-attention-heads 4 --seq-length 128 --fp16"
    flags += " --max-position-embeddings 128 --vocab-size 1000 --global-batch-size 4"
    flags += " --hidden-dropout 0.1 --attention-backend unfused"
    workload = workload_of(model=None, flags=flags.split())
    cluster = parse_cluster(CLUSTER.replace("MEMORY", "1GB").replace("HOST", "1GiB").encode())
    prices = costs_of_workload(cluster, workload, [], global_batch_size=4)
    again = prices.inputs_for(workload.model, 4)
    assert again.memory == prices.inputs.memory != small(model=workload.model).memory


def test_host_memory_is_always_told():
    inputs = small(memory="4GB")
    told = " ".join(explain(inputs, fitting(inputs).plan).sentences)
    assert (
        "Offloaded to host memory: " in told and "of 64.0 GiB in node one (optimizer state" in told
    )
    roomy = small()
    told = " ".join(explain(roomy, fitting(roomy).plan).sentences)
    assert "Nothing is offloaded to host memory." in told


def test_check_refuses_a_plan_that_its_hosts_cannot_hold(run, tmp_path):
    (tmp_path / "small.yaml").write_text(CLUSTER.replace("MEMORY", "4GB").replace("HOST", "64GiB"))
    save_plan(fitting(small(memory="4GB")).plan, tmp_path / "small.json")
    flags = "--num-layers 8 --hidden-size 2048 --ffn-hidden-size 5632 --num-attention-heads 32"
    flags += " --swiglu --normalization RMSNorm --disable-bias-linear --seq-length 512 --fp16"
    flags += " --position-embedding-type rope --untie-embeddings-and-output-weights"
    flags += f" --vocab-size {MODEL.vocab_size} --global-batch-size 4 --eval-interval 9"
    enough = run("check", "small.json", "small.yaml", "--", *flags.split())
    assert enough.exit_code == 0, enough.output
    assert "GiB of 64.0 GiB in node one (optimizer state" in enough.output
    (tmp_path / "small.yaml").write_text(CLUSTER.replace("MEMORY", "4GB").replace("HOST", "1GiB"))
    short = run("check", "small.json", "small.yaml", "--", *flags.split())
    assert short.exit_code == 1
    assert "host memory of node one: found 1.00 GiB; expected " in short.output
