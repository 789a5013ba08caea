"""Where the demo trains."""

from enum import StrEnum

from zorse_megatron.errors import Problem, ZorseError


class Device(StrEnum):
    """`--device` of the demo."""

    CPU = "cpu"
    CUDA = "cuda"


def count_gpus() -> int:
    """How many GPUs torch sees. Raises ZorseError where there is none."""
    import torch

    count = torch.cuda.device_count()
    if not count:
        problem = Problem(
            where="--device",
            found="cuda, while torch sees no GPU",
            expected="a GPU",
            remedy="Leave it out to train on the CPU, or check nvidia-smi and "
            "`python -c 'import torch; print(torch.version.cuda)'`.",
        )
        raise ZorseError("The demo cannot run there", [problem])
    return count
