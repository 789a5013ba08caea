"""Importing Megatron without its remarks on packages that a CPU run does not need."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_imports() -> Iterator[None]:
    """Hide warnings for the duration of a `with` block that imports Megatron."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # Where a CUDA toolkit is installed and no GPU is visible, torch says so through this one.
        logger = logging.getLogger("torch.utils.cpp_extension")
        level = logger.level
        logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            logger.setLevel(level)
