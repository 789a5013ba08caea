"""What measured layers become in a profile: series that grow, and what is still missing of them."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zorse_megatron.flags.command import split_script
from zorse_megatron.flags.model_in_flags import shape_from_flags
from zorse_megatron.inputs.profile import Profile, Source, dump_profile, parse_profile, save_profile
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
    LayerRequest,
    MeasuredPass,
    MeasuredStep,
    answer_from_json,
    answer_to_json,
    single_layer_flags,
)

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
    return MeasuredPass(
        part=part,  # type: ignore[arg-type]
        micro_batch_size=size,
        forward_s=0.001 * size,
        backward_s=0.002 * size,
        parameters=100,
        kept_bytes=kept * size,
        peak_bytes=peak * size,
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


@pytest.mark.parametrize("answer", [one_pass("head", 2), STEP])
def test_answers_travel_as_lines(answer: MeasuredPass | MeasuredStep) -> None:
    line = answer_to_json(answer)
    assert "\n" not in line and answer_from_json(line) == answer


def test_requests_travel_as_lines() -> None:
    request = LayerRequest(
        first_sizes={"layer": 4, "head": 1},
        largest_size=8,
        time_limit_s=2.0,
        memory_limit_bytes=None,
    )
    assert LayerRequest.from_json(request.to_json()) == request


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
