"""docs/gpus.md has the table that the code makes.

After a change of it: `python -m tests.unit.test_gpu_docs` writes it anew.
"""

import re
from pathlib import Path

from zorse_megatron.software.gpu_flags import with_gpu_flags
from zorse_megatron.software.rank_software import RankSoftware
from zorse_megatron.software.support_table import support_table

DOCUMENT = Path(__file__).parents[2] / "docs" / "gpus.md"
TABLE = re.compile(r"(?<=test_gpu_docs`. -->\n).*?(?=\n\n)", re.DOTALL)


def test_the_table_is_what_the_code_says():
    (found,) = TABLE.findall(DOCUMENT.read_text(encoding="utf-8"))
    assert found == support_table()


def test_every_flag_that_is_added_is_documented():
    bare = RankSoftware(
        rank=0, node="", gpu=None, torch="", archs=(), nccl=None,
        transformer_engine=None, flash_attention=None, extensions=(),
    )  # fmt: skip
    text = DOCUMENT.read_text(encoding="utf-8")
    for each in with_gpu_flags([], bare).added:
        assert f"`{' '.join(each.words)}`" in text


def write_anew():
    text = DOCUMENT.read_text(encoding="utf-8")
    DOCUMENT.write_text(TABLE.sub(support_table(), text), encoding="utf-8")


if __name__ == "__main__":
    write_anew()
