import re
from pathlib import Path

import pytest

from zorse_megatron.flags import turned_off
from zorse_megatron.flags.accepted import COMPARED, FINE, PREDICTED
from zorse_megatron.flags.flag_handling import handlings_of, is_among, is_refused
from zorse_megatron.flags.refused import DECIDED_BY_PLAN, REFUSED
from zorse_megatron.flags.table import defaults


def test_every_flag_has_one_verdict():
    counts = {name: len(handlings_of(name)) for name in defaults()}
    assert {name: count for name, count in counts.items() if count != 1} == {}


LISTS = [COMPARED, PREDICTED, FINE, *(each.names for each in (*DECIDED_BY_PLAN, *REFUSED))]


@pytest.mark.parametrize("names", LISTS)
def test_every_name_in_a_list_is_a_flag_of_megatron(names):
    unused = [each for each in names.split() if not any(is_among(n, each) for n in defaults())]
    assert unused == []


def test_a_default_that_megatron_takes_from_the_environment_is_accepted():
    """`--inprocess-active-world-size` defaults to WORLD_SIZE, which torchrun and srun set."""
    assert is_refused("inprocess_active_world_size", 8) is None
    assert is_refused("inprocess_restart", True) is not None


@pytest.mark.parametrize("folder", ["scripts", "tests/megatron", "tests/slurm", "zorse_megatron"])
def test_what_runs_of_ours_turn_off_stands_in_one_place(folder):
    """With its reason; the demo says its own."""
    off = re.compile(r'"--(num-workers|eval-iters|hidden-dropout|attention-dropout)"[,:] "?0[",)]')
    root = Path(turned_off.__file__).parents[2]
    found = {
        str(path.relative_to(root))
        for path in (root / folder).rglob("*.py")
        if "demo" not in path.parts and off.search(path.read_text(encoding="utf-8"))
    }
    assert found == ({"zorse_megatron/flags/turned_off.py"} & {f"{folder}/flags/turned_off.py"})
