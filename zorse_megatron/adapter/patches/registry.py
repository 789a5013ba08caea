"""Every function and class that is rebound in this project; no other record can be applied.

`rebind.py` checks, applies and undoes records. They say what and why; what takes a name's place is
made where it belongs, and passed in. Nothing here imports torch or Megatron until a record is
applied.

Beside it there are CPU mode, which stands in for torch.cuda as a whole where there is no GPU
(`adapter/cpu_mode.py`), and the values of Megatron's `parallel_state` that are made from the
plan (`adapter/groups/global_groups.py`).
"""

from zorse_megatron.adapter.patches.checkpoints import CHECKPOINTS
from zorse_megatron.adapter.patches.rebind import Registry
from zorse_megatron.adapter.patches.under_plan import LINEAR_LAYERS, MOVING, UNDER_A_PLAN
from zorse_megatron.adapter.patches.without_plan import ALWAYS, EMULATION, MEASURING, RECORDING

_UNDER_ANY_PLAN = (*UNDER_A_PLAN, *LINEAR_LAYERS, *CHECKPOINTS, *MOVING)

REGISTRY = Registry([*_UNDER_ANY_PLAN, *ALWAYS, *RECORDING, *MEASURING, *EMULATION])
