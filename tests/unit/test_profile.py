import dataclasses
import json

import pytest

from tests.unit.profile_samples import good
from zorse_megatron.errors import ProfileError
from zorse_megatron.inputs.profile import (
    dump_profile,
    joined,
    load_profile,
    parse_profile,
    save_profile,
)


def test_good():
    profile = parse_profile(json.dumps(good()).encode())
    assert profile.gpu_kinds() == ("T4",)
    assert profile.model_named("tiny").shape().layer_parameters() == 12 * 64 * 64 + 13 * 64


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
