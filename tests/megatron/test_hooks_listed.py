"""The documents list every name of Megatron that is rebound, and no other."""

import re
from inspect import signature

from tests.megatron.launch import REPOSITORY
from tests.megatron.preloaded import run_megatron_ranks


def _unused(*_args: object, **_kwargs: object) -> None:
    raise AssertionError("a record's hook is not called to list it")


def _targets() -> set[str]:
    from argparse import Namespace
    from pathlib import Path

    from zorse_megatron.adapter.checkpoint_check import LOAD_RECORDS
    from zorse_megatron.adapter.checkpoint_choice import same_on_all
    from zorse_megatron.adapter.checkpoint_manifest import MANIFEST_RECORDS
    from zorse_megatron.adapter.hooks import argument_records, entry_records, training_records
    from zorse_megatron.checkpoints.choice import Load
    from zorse_megatron.checkpoints.folder import Checkpoint
    from zorse_megatron.demo.model import demo_plan

    args, root = Namespace(ckpt_step=None), Path("saved")
    load = Load(root=root, non_persistent=root / "non_persistent")
    records = [
        *same_on_all(args, load, Checkpoint(root=root, iteration=4)),
        *argument_records(demo_plan(), world_size=5),
        *entry_records(_unused),
        *MANIFEST_RECORDS,
        *LOAD_RECORDS,
        *training_records(**dict.fromkeys(signature(training_records).parameters, _unused)),
    ]
    return {record.target for record in records}


def test_the_list_of_hooks_is_complete() -> None:
    text = (REPOSITORY / "docs/how-it-works.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"`(megatron[\w.]*:\w+)`", text))
    assert [listed] == run_megatron_ranks(1, _targets)
