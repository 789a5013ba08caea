"""The table of flags is that of the installed Megatron's parser, read and judged alike."""

import json
from pathlib import Path

from tests.megatron.launch import run_ranks


def test_the_table_is_the_parser(tmp_path: Path) -> None:
    path = tmp_path / "answer.json"
    result = run_ranks([str(path)], 1, entry="tests.megatron.parser_entry", timeout_s=120)
    assert result.returncodes == (0,), result.outputs[0]
    answer = json.loads(path.read_text())
    assert (answer["missing"], answer["gone"]) == ([], []), "run scripts/write_megatron_flags.py"
    assert answer["same_order"]
    assert answer["number"] > 1000
    assert answer["differing"] == []
