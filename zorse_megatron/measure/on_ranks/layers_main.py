"""Measures the layers of a training command.

    python -m zorse_megatron.measure.on_ranks.layers_main PIPE REQUEST [SCRIPT.py] MEGATRON_FLAGS

A process of its own, as the only rank of a job: whatever Megatron sets up, and whatever memory its
model took, is gone when it ends. PIPE is the number of an open file; answers go there, as what
Megatron prints goes to the standard output.
"""

import os
import sys
from pathlib import Path
from typing import Any

from zorse_megatron.adapter.measuring_run import run_until_built
from zorse_megatron.errors import ZorseError
from zorse_megatron.log import complain
from zorse_megatron.measure.on_ranks.layer_timing import answers
from zorse_megatron.measure.tasks import LayerRequest, answer_to_json
from zorse_megatron.processes import end_with_parent


def main() -> None:
    """Entry point; exits with status 2 and all problems on flags that cannot be used."""
    # A rank that is ended must not leave this process behind with its GPU.
    end_with_parent()
    pipe, request, *command = sys.argv[1:]
    has_script = bool(command) and command[0].endswith(".py")
    script = Path(command[0]) if has_script else None

    def measure(model: Any, optimizer: Any) -> None:
        from zorse_megatron.adapter.model.model_passes import ModelPasses

        with os.fdopen(int(pipe), "w") as out:
            for answer in answers(
                ModelPasses(model), optimizer.step, LayerRequest.from_json(request)
            ):
                print(answer_to_json(answer), file=out, flush=True)

    try:
        run_until_built(script, command[has_script:], measure)
    except ZorseError as error:
        complain(str(error), everywhere=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
