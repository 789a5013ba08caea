import pytest

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
