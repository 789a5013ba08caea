"""The kernels in Triton, by name."""

from collections.abc import Callable
from typing import Any

KERNELS: dict[str, Callable[..., Any]] = {}
