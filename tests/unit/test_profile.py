"""Profiles: read, joined, imported, and made of what ranks measured."""

import dataclasses
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.import_profile import import_tables, main
from tests.measured import MEASURED, imported, needs_measured
from tests.unit.profile_samples import good
from zorse_megatron.errors import ProfileError
from zorse_megatron.flags.command import split_script
from zorse_megatron.flags.model_in_flags import shape_from_flags
from zorse_megatron.inputs.profile import (
    Profile,
    Source,
    dump_profile,
    joined,
    load_profile,
    parse_profile,
    save_profile,
)
from zorse_megatron.measure.measured_profile import (
    PARTS,
    MeasuredSeries,
    first_sizes,
    is_complete,
    loaded_or_empty,
    profiled_model,
    series_of,
    with_model,
    with_pass,
    with_source,
    with_step,
    without_series,
)
from zorse_megatron.measure.tasks import (
    ANSWERS,
    REQUESTS,
    LayerRequest,
    MeasuredPass,
    MeasuredStep,
    single_layer_flags,
)


def test_good():
    profile = parse_profile(json.dumps(good()).encode())
    assert profile.gpu_kinds() == ("T4",)
    assert profile.model_named("tiny").layer_parameters() == 12 * 64 * 64 + 13 * 64


def test_save_and_load(tmp_path):
    profile = parse_profile(json.dumps(good()).encode())
    save_profile(profile, tmp_path / "profile.json")
    assert load_profile(tmp_path / "profile.json") == profile
    text = (tmp_path / "profile.json").read_text()
    assert text == dump_profile(profile)
    assert dump_profile(parse_profile(text.encode())) == text


def test_a_bad_profile_is_not_saved(tmp_path):
    profile = parse_profile(json.dumps(good()).encode())
    bad = dataclasses.replace(profile, sources=profile.sources * 2)
    with pytest.raises(ProfileError, match="2 entries with the name"):
        save_profile(bad, tmp_path / "profile.json")
    assert not list(tmp_path.iterdir())


def test_join():
    first = parse_profile(json.dumps(good()).encode())
    other = dataclasses.replace(first.times[0], gpu_kind="L4")
    second = dataclasses.replace(first, times=(other,), updates=(), memory=(), links=())
    both = joined([first, second])
    assert (both.sources, both.models) == (first.sources, first.models)
    assert both.gpu_kinds() == ("T4", "L4")
    with pytest.raises(ProfileError, match="a second entry for what times"):
        joined([first, first])


# Import.

MINI = Path(__file__).parents[2] / "examples" / "mini-profile.json"

LAYERS = """model,gpu,seq_length,dtype,micro_batch_size,forward_ms,backward_ms
llama-7b,t4,512,float16,2,14.0,42.0
llama-7b,t4,512,float16,1,8.0,30.0
llama-7b,a100x40,512,float16,1,1.5,5.5
"""
# Two layers that differ, a final norm on its own, and the head.
PARALLEL = """model,gpu,micro_batch_size,tensor_parallel,layer_index,forward_ms,backward_ms,\
update_ms
OPT-350,GH-96,1,1,0,0.5,0.0,2.0
OPT-350,GH-96,1,1,1,2.0,4.0,2.0
OPT-350,GH-96,1,1,2,3.0,6.0,2.0
OPT-350,GH-96,1,1,3,0.1,0.2,2.0
OPT-350,GH-96,1,1,4,5.0,9.0,2.0
"""
MEMORY = """model,tensor_parallel,layer_index,params_floats,activation_floats,output_floats
OPT-350,1,0,53608448.0,524288,524288
OPT-350,1,1,12596224,20000000,524288
OPT-350,1,2,12596224,20000000,524288
OPT-350,1,3,51513344,52000000,25755649
"""
LINKS = """link,gpu,gpus_sharing,a,b,c,max_bytes_per_s
intra-node,A100-40,2,0.8,16.4,33.0,2.4e11
intra-node,A100-40,2,0.8,16.4,33.0,2.4e11
inter-node,V100-16,1,-0.1,1.0,2.0,3e9
"""


def run(*texts, **settings):
    return import_tables({f"t{i}.csv": text.encode() for i, text in enumerate(texts)}, **settings)


def problems(*texts, **settings):
    try:
        run(*texts, **settings)
    except ProfileError as error:
        return error.problems
    return ()


def test_layers():
    profile = run(LAYERS, origin="the lab").profile
    t4, a100 = profile.times
    assert (t4.gpu_kind, t4.part, t4.dtype, t4.seq_length) == ("T4", "layer", "float16", 512)
    assert t4.micro_batch_sizes == (1, 2)
    assert t4.forward_s == (0.008, 0.014)
    assert t4.backward_s == (0.030, 0.042)
    assert a100.gpu_kind == "A100-40"
    assert profile.model_named("llama-7b").ffn_hidden_size == 11008
    (source,) = profile.sources
    assert (source.name, source.kind, source.origin) == ("t0.csv", "measured", "the lab")
    assert {entry.source for entry in profile.times} == {"t0.csv"}


def test_points_of_the_same_size_become_their_median():
    more = LAYERS + "llama-7b,t4,512,float16,1,9.0,31.0\nllama-7b,t4,512,float16,1,20.0,32.0\n"
    times = run(more).profile.times[0]
    assert times.forward_s == (0.009, 0.014)
    assert times.backward_s == (0.031, 0.042)


def test_layers_by_tensor_parallel_size():
    result = run(PARALLEL)
    times = {entry.part: entry for entry in result.profile.times}
    assert times["embedding"].forward_s == (0.0005,)
    assert times["layer"].forward_s == pytest.approx((0.0025,))
    assert times["layer"].backward_s == pytest.approx((0.005,))
    assert times["head"].forward_s == pytest.approx((0.0051,))  # with the norm before it
    assert {entry.seq_length for entry in times.values()} == {2048}
    assert {entry.gpu_kind for entry in times.values()} == {"GH200-96"}
    (update,) = result.profile.updates
    # Two different layers were stepped, between embedding and head.
    assert update.num_parameters == 53608448 + 2 * 12596224 + 51513344
    assert update.update_s == 0.002
    assert any("has no dtype: taken as float32" in note for note in result.notes)


def test_the_memory_table_tells_the_sequence_length():
    result = run(PARALLEL, MEMORY)
    assert {entry.seq_length for entry in result.profile.times} == {512}
    layer = next(entry for entry in result.profile.memory if entry.part == "layer")
    assert (layer.parameters, layer.activation_elements) == (12596224, 20000000)
    assert any("OPT-350: sequence length 512" in note for note in result.notes)


def test_links():
    result = run(LINKS)
    assert [(link.link, link.gpu_kind) for link in result.profile.links] == [
        ("intra-node", "A100-40"),
        ("inter-node", "V100-16"),
    ]
    assert result.notes == ()


HEADER = LAYERS.splitlines()[0]
ONE_PROBLEM = {
    "empty": ("", "t0.csv", "an empty file", "a profile in JSON"),
    "one column absent": (
        LAYERS.replace(",dtype", ",type"),
        "t0.csv: line 1",
        "columns model, gpu, seq_length, type",
        "dtype too",
    ),
    "no rows": (HEADER + "\n", "t0.csv", "a header without rows", "measurements"),
    "a cell too many": (LAYERS.replace("42.0", "42.0,1"), "t0.csv: line 2", "too many", "7"),
    "text": (LAYERS.replace("14.0", "fast"), "t0.csv: line 2: forward_ms", "'fast'", "number"),
    "negative time": (LAYERS.replace("14.0", "-1"), "line 2: forward_ms", "'-1'", "equal to 0"),
    "infinite time": (LAYERS.replace("14.0", "inf"), "forward_ms", "'inf'", "86400000"),
    "no number": (LAYERS.replace("14.0", "nan"), "line 2: forward_ms", "'nan'", "86400000"),
    "no micro-batch": (LAYERS.replace("float16,2", "float16,0"), "_size", "'0'", "equal to 1"),
    "no name": (LAYERS.replace("llama-7b,a100", ",a100"), "line 4: model", "''", "well-known"),
    "a model without a shape": (
        LAYERS.replace("llama-7b,a100", "mine,a100"),
        "line 4: model",
        "'mine'",
        "a well-known model, whose shape is known",
    ),
    "unknown dtype": (LAYERS.replace("40,512,float16", "40,512,fp16"), "dtype", "fp16", "float16"),
    "no time at all": (
        LAYERS.replace("1.5,5.5", "0,5.5"),
        "times[1].forward_s",
        "a layer that takes no time",
        "above 0",
    ),
    "unknown link": (LINKS.replace("inter", "outer"), "link", "outer-node", "inter-node"),
    "a link that carries nothing": (LINKS.replace("3e9", "0"), "per_s", "'0'", "greater than 0"),
    "half a parameter": (
        MEMORY.replace("12596224", "12596224.5", 1),
        "t0.csv: line 3: params_floats",
        "'12596224.5'",
        "integer",
    ),
}


@pytest.mark.parametrize("case", ONE_PROBLEM)
def test_one_clear_message(case):
    text, where, found, expected = ONE_PROBLEM[case]
    (problem,) = problems(text)
    assert where in problem.where
    assert found in problem.found
    assert expected in problem.expected
    assert problem.remedy


def test_not_all_bad_rows_are_listed():
    rows = "llama-7b,t4,512,float16,1,x,1\n" * 50
    found = problems(f"{HEADER}\n{rows}")
    assert len(found) == 20


def test_the_same_table_twice():
    with pytest.raises(ProfileError, match="2 entries with the name"):
        import_tables({"a/t.csv": LAYERS.encode(), "b/t.csv": LAYERS.encode()})


def test_the_script(tmp_path, monkeypatch, capsys):
    (tmp_path / "layers.csv").write_text(LAYERS)
    monkeypatch.chdir(tmp_path)
    words = ["import_profile", "layers.csv", "--out", "p.json", "--origin", "lab"]
    monkeypatch.setattr(sys, "argv", words)
    assert main() == 0
    assert "p.json: 2 series of times on 2 kinds of GPU" in capsys.readouterr().out
    found = load_profile("p.json")
    assert found.sources[0].origin == "lab" and len(found.times) == 2
    (tmp_path / "layers.csv").write_text("a,b\n1,2\n")
    assert main() == 1
    assert "layers.csv: line 1: found columns a, b" in capsys.readouterr().err


def test_its_help_lists_the_columns_of_the_tables(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["import_profile", "--help"])
    with pytest.raises(SystemExit):
        main()
    shown = capsys.readouterr().out
    for table in (LAYERS, PARALLEL, MEMORY, LINKS):
        assert ", ".join(table.splitlines()[0].split(",")) in shown


@needs_measured
def test_public_tables():
    result = imported()
    profile = result.profile
    assert len(profile.gpu_kinds()) == 14
    layers = [times for times in profile.times if times.source == "layer_latency.csv"]
    assert sum(len(times.micro_batch_sizes) for times in layers) == 2489
    assert len(profile.links) == 20
    assert parse_profile(dump_profile(profile).encode()) == profile
    # Their Llama was profiled at another length than the README of the tables says of all.
    assert any("LLAMA-3-8: sequence length 8192" in note for note in result.notes)


@needs_measured
@pytest.mark.parametrize(
    ("kind", "picoseconds"), [("A100-40", 22.6), ("V100-16", 37.4), ("GH200-96", 10.2)]
)
def test_a_step_of_any_model_costs_the_same_per_parameter(kind, picoseconds):
    """That the count of stepped parameters is right: only so do different models agree."""
    rates = [
        1e12 * entry.update_s / entry.num_parameters
        for entry in imported().profile.updates
        if entry.gpu_kind == kind and entry.num_parameters > 120e6
    ]
    close = [rate for rate in rates if rate == pytest.approx(picoseconds, rel=0.06)]
    assert len(close) >= 0.5 * len(rates)
    assert min(rates) > 0.94 * picoseconds


@needs_measured
def test_the_profile_of_the_examples():
    """It is what the table in the authors' code says of its models and GPUs."""
    mini = load_profile(MINI)
    wanted = {(each.model, each.gpu_kind, each.seq_length, each.dtype) for each in mini.times}
    text = (MEASURED / "layer_latency.csv").read_text()
    found = run(text).profile.times
    kept = [
        replace(each, source=mini.sources[0].name)
        for each in found
        if (each.model, each.gpu_kind, each.seq_length, each.dtype) in wanted
    ]
    assert sorted(kept, key=repr) == sorted(mini.times, key=repr)


# Measured.

FLAGS_IN_ONE_TEXT = (
    "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 1000 "
    "--position-embedding-type rope --fp16 --global-batch-size 16"
)
FLAGS = FLAGS_IN_ONE_TEXT.split()
OF_A_CLUSTER = (
    "--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 2 --bf16 "
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 "
    "--rampup-batch-size 2 2 100 --load old --use-distributed-optimizer --swiglu "
    "--tokenizer-type=SentencePieceTokenizer --tokenizer-model /no/such/file "
    "--zorse-plan plan.json --zorse-trace=traces "
    "--train-samples 1000 --overlap-grad-reduce --recompute-modules core_attn mlp"
)
SHAPE = shape_from_flags(FLAGS)
T4 = MeasuredSeries(model=profiled_model(SHAPE), gpu_kind="T4", dtype="float16")
L4 = MeasuredSeries(model=profiled_model(SHAPE), gpu_kind="L4", dtype="float16")
STEP = MeasuredStep(num_parameters=1000, update_s=0.01)


def started() -> Profile:
    source = Source(name=T4.source, kind="measured")
    return with_model(Profile(schema_version=1, sources=(source,)), T4.model)


def one_pass(part: str, size: int, *, kept: int = 640, peak: int = 900) -> MeasuredPass:
    """From size 16 on weight gradients apart are missing, as if memory had run out there."""
    return MeasuredPass(
        part=part,  # type: ignore[arg-type]
        micro_batch_size=size,
        forward_s=0.001 * size,
        backward_s=0.002 * size,
        parameters=100,
        saved_bytes=kept * size,
        peak_bytes=peak * size,
        weight_gradients_s=0.0005 * size if part == "layer" and size < 16 else None,
    )


passes = st.lists(
    st.tuples(st.sampled_from([T4, L4]), st.sampled_from(PARTS), st.integers(0, 5)), unique=True
)


@given(passes)
def test_any_order_of_measurements_makes_a_profile_that_loads(
    measured: list[tuple[MeasuredSeries, str, int]],
) -> None:
    profile = started()
    for series, part, power in measured:
        profile = with_pass(profile, series, one_pass(part, 2**power))
    assert parse_profile(dump_profile(profile).encode()) == profile
    for series in (T4, L4):
        for part in PARTS:
            sizes = sorted(2**n for s, p, n in measured if (s, p) == (series, part))
            found = series_of(profile, series, part)
            assert (list(found.micro_batch_sizes) if found else []) == sizes
            assert first_sizes(profile, series)[part] == (2 * sizes[-1] if sizes else 1)
            if found is not None:
                assert found.forward_s == tuple(0.001 * size for size in sizes)
                assert found.backward_s == tuple(0.002 * size for size in sizes)
                are_apart = part == "layer" and sizes[-1] < 16
                apart_s = tuple(0.0005 * size for size in sizes) if are_apart else None
                assert found.weight_gradients_s == apart_s


def test_a_kind_is_complete_with_its_step_and_not_before() -> None:
    profile = with_pass(started(), T4, one_pass("layer", 1))
    assert not is_complete(profile, T4)
    profile = with_step(profile, T4, STEP)
    assert is_complete(profile, T4) and not is_complete(profile, L4)
    anew = without_series(with_pass(profile, L4, one_pass("layer", 1)), T4)
    assert first_sizes(anew, T4)["layer"] == 1 and not is_complete(anew, T4)
    assert first_sizes(anew, L4)["layer"] == 2


def test_other_layers_are_other_models_and_more_layers_are_not() -> None:
    deeper = shape_from_flags([*FLAGS, "--num-layers", "16"])
    wider = shape_from_flags([*FLAGS, "--ffn-hidden-size", "512"])
    assert profiled_model(deeper).name == T4.model.name != profiled_model(wider).name
    assert with_model(started(), profiled_model(deeper)) == started()


def test_memory_is_in_elements_of_one_sample_and_the_most_of_each_kind() -> None:
    profile = with_pass(started(), T4, one_pass("layer", 4, kept=640))
    profile = with_pass(profile, L4, one_pass("layer", 4, kept=512))
    profile = with_pass(profile, L4, one_pass("layer", 2, kept=200))
    profile = with_pass(profile, L4, one_pass("head", 4, kept=512, peak=901))
    found = {(entry.part, entry.gpu_kind): entry for entry in profile.memory}
    assert found["layer", "T4"].activation_elements == 320  # 640 bytes in float16
    assert found["layer", "L4"].activation_elements == 256
    assert found["layer", "T4"].output_elements == 32 * 64
    assert found["head", "L4"].activation_elements == 451  # the peak, rounded up


def test_what_a_process_has_beside_tensors_is_the_newest_of_each_kind() -> None:
    profile = with_step(started(), T4, dataclasses.replace(STEP, context_bytes=400))
    profile = with_step(profile, L4, dataclasses.replace(STEP, context_bytes=500))
    profile = with_step(profile, T4, dataclasses.replace(STEP, context_bytes=300))
    profile = with_step(profile, L4, STEP)  # without a GPU nothing is known of it
    found = {each.gpu_kind: each.context_bytes for each in profile.processes}
    assert found == {"T4": 300, "L4": 500}


def test_an_existing_file_is_added_to_and_keeps_the_rest(tmp_path) -> None:
    path = tmp_path / "profile.json"
    save_profile(with_step(with_pass(started(), L4, one_pass("layer", 1)), L4, STEP), path)
    again = loaded_or_empty(path, Source(name="other", kind="measured"))
    assert is_complete(again, L4) and {s.name for s in again.sources} == {T4.source, "other"}
    newer = Source(name="other", kind="measured", origin="later")
    assert with_source(again, newer).sources[-1] == newer
    assert len(with_source(again, newer).sources) == 2


REQUEST = LayerRequest(
    first_sizes={"layer": 4, "head": 1},
    largest_size=8,
    time_limit_s=2.0,
    memory_limit_bytes=None,
    used_bytes=500_000_000,
)


@pytest.mark.parametrize(
    ("kind", "sent"), [(ANSWERS, one_pass("head", 2)), (ANSWERS, STEP), (REQUESTS, REQUEST)]
)
def test_requests_and_answers_travel_as_lines(kind, sent) -> None:
    line = kind.dump_json(sent)
    assert b"\n" not in line and kind.validate_json(line) == sent


def last_values(flags: tuple[str, ...]) -> dict[str, str]:
    """As argparse reads them."""
    values = {}
    for word, following in zip(flags, [*flags[1:], "--"], strict=True):
        if word.startswith("--"):
            values[word] = "" if following.startswith("--") else following
    return values


def test_the_flags_of_a_cluster_become_those_of_one_layer_on_one_rank() -> None:
    cluster = OF_A_CLUSTER.split()
    found = last_values(single_layer_flags([*FLAGS, *cluster], SHAPE))
    for flag in ("--load", "--rampup-batch-size", "--overlap-grad-reduce", "--train-samples"):
        assert flag not in found
    assert not any(flag.startswith("--recompute") for flag in found)
    assert not any(flag.startswith("--zorse") for flag in found)
    assert "core_attn" not in single_layer_flags([*FLAGS, *cluster], SHAPE)
    assert "--use-distributed-optimizer" in found and "--swiglu" in found
    expected = {
        "--num-layers": "1",
        "--pipeline-model-parallel-size": "1",
        "--micro-batch-size": "1",
        "--tokenizer-type": "NullTokenizer",
        "--hidden-size": "64",
    }
    assert expected.items() <= found.items()
    # The same padded vocabulary as in training: 1000 becomes 1024.
    assert shape_from_flags(single_layer_flags(FLAGS, SHAPE)).vocab_size == SHAPE.vocab_size == 1024


def test_a_script_comes_before_the_flags() -> None:
    script, flags = split_script(["train.py", *FLAGS])
    assert str(script) == "train.py" and flags == tuple(FLAGS)
    assert split_script(FLAGS) == (None, tuple(FLAGS))
