"""On a GPU's streams everything waits for what it needs, and a wait that is missing is seen."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.megatron.comparison import flags_for
from tests.megatron.launch import run_ranks
from tests.megatron.plans import BOTH_ENDS, split, with_settings
from tests.megatron.test_exactness import ROWS, Row
from tests.megatron.upstream import SCRIPT
from zorse_megatron.plan.plan import Schedule
from zorse_megatron.plan.plan_file import save_plan

APART, HOST = "interleaved, weight gradients apart", "in the host, layered"
LEVELS = "two levels, an idle rank and one without a shard"
CASES = {
    APART: Row(plan=split(with_settings(BOTH_ENDS, schedule=Schedule(name="interleaved")))),
    **{
        name: ROWS[name]
        for name in (HOST, LEVELS, "1|2+1, llama, cyclic, recompute, no clip, sequence parallel")
    },
}
# Where waits are left out -> what then has hazards.
MISSING = {
    "host_link hold_back": HOST,
    "transport after": APART,
    "collectives _on_streams": LEVELS,
}


def rehearsed(
    row: Row, corpus: Path, record: Path, *, entry: str = "rehearsal_entry", without: str = ""
) -> tuple[Any, list[dict[str, Any]]]:
    """What the last rank logs, and of each rank hazards and waits."""
    record.mkdir(parents=True)
    save_plan(row.plan, record / "plan.json")
    training = flags_for(corpus, *row.flags, steps=2)
    flags = [*SCRIPT, *training, "--zorse-plan", str(record / "plan.json")]
    env = {**row.env, "ZORSE_TEST_RECORD": str(record), "ZORSE_TEST_WITHOUT": without}
    ranks = range(row.plan.world_size)
    run_ranks(flags, len(ranks), entry=f"tests.megatron.{entry}", timeout_s=120, env=env).check()
    steps = json.loads((record / f"steps-rank{ranks[-1]}.json").read_text())
    if entry != "rehearsal_entry":
        return steps, []
    return steps, [
        json.loads((record / f"rehearsal-rank{rank}.json").read_text()) for rank in ranks
    ]


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_used_before_it_is_there(name: str, corpus: Path, tmp_path: Path) -> None:
    row = CASES[name]
    found, ranks = rehearsed(row, corpus, tmp_path / "watched")
    assert [each["hazards"] for each in ranks] == [[]] * len(ranks)
    if name == APART:  # test_nccl_order.py compares the others' kinds
        expected, _ = rehearsed(row, corpus, tmp_path / "plain", entry="recording_entry")
        assert found == expected


@pytest.mark.parametrize(("without", "name"), MISSING.items())
def test_a_wait_that_is_missing_is_seen(
    without: str, name: str, corpus: Path, tmp_path: Path
) -> None:
    _, ranks = rehearsed(CASES[name], corpus, tmp_path / "watched", without=without)
    assert any(without in each["waits"] for each in ranks), "it is waited for there"
    assert any(each["hazards"] for each in ranks)
