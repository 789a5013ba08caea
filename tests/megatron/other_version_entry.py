"""`zorse_megatron.pretrain` as it would run with a Megatron that we do not know."""

import os
from pathlib import Path

from tests.megatron.comparison import LAYOUTS
from zorse_megatron.adapter import activate
from zorse_megatron.pretrain import main
from zorse_megatron.schema.plan.plan_json import save_plan

if __name__ == "__main__":
    save_plan(LAYOUTS["2|1"], Path(os.environ["ZORSE_TEST_PLAN"]))
    activate.installed_megatron = lambda: "0.18.1"
    main()
