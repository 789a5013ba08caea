"""`zorse_megatron.pretrain` as it would run with a Megatron that we do not know."""

import os
from pathlib import Path

from tests.megatron.plans import LAYOUTS
from zorse_megatron.adapter.patches.rebind import REGISTRY
from zorse_megatron.plan.plan_file import save_plan
from zorse_megatron.pretrain import main

if __name__ == "__main__":
    save_plan(LAYOUTS["2|1"], Path(os.environ["ZORSE_TEST_PLAN"]))
    REGISTRY.installed = lambda: "0.18.1"
    main()
