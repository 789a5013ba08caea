"""`--zorse-mirror` on the way from the command to the ranks."""

from dataclasses import replace

import pytest

from zorse_megatron.errors import FlagError
from zorse_megatron.launch.training_command import training_of
from zorse_megatron.migration.mirror.request import MirrorRequest
from zorse_megatron.pretrain_command import split_command

TRAINING = ("--num-layers", "4", "--save", "d")


def test_a_run_is_told_by_what_is_not_ours() -> None:
    """Another plan at the next start is the same run."""
    for plan in ("a.json", "b.json"):
        words = [*TRAINING, "--zorse-plan", plan, "--zorse-mirror", "5"]
        found = MirrorRequest(every=5, overlaps=False, training=TRAINING)
        assert split_command(words).mirror == found
        beside = split_command([*words, "--zorse-mirror-overlap", "on"]).mirror
        assert beside == replace(found, overlaps=True)
    assert split_command([*TRAINING, "--zorse-plan", "a.json"]).mirror is None


@pytest.mark.parametrize("every", ["0", "-1", "1.5", "each", ""])
def test_what_is_no_number_of_iterations_is_refused(every: str) -> None:
    words = [*TRAINING, "--zorse-plan", "a.json", f"--zorse-mirror={every}"]
    with pytest.raises(FlagError, match="a whole number of iterations, 1 or more"):
        split_command(words)


def test_it_needs_a_plan() -> None:
    with pytest.raises(FlagError, match="--zorse-mirror: found no --zorse-plan"):
        split_command([*TRAINING, "--zorse-mirror", "5"])


@pytest.mark.parametrize("words", [["on"], ["yes", "--zorse-mirror", "5"]])
def test_an_overlap_of_nothing_or_neither_on_nor_off_is_refused(words: list[str]) -> None:
    with pytest.raises(FlagError, match="--zorse-mirror-overlap: found"):
        split_command([*TRAINING, "--zorse-plan", "a.json", "--zorse-mirror-overlap", *words])


def test_launched_ranks_get_it() -> None:
    given = (*TRAINING, "--zorse-mirror", "5")
    assert training_of(given, plan="p", cluster="c").words[: len(given)] == given
