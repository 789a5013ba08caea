"""Why there is no plan."""

from collections.abc import Mapping

from zorse_megatron.errors import Problem, ZorseError


class PlannerInputError(ZorseError):
    """Cluster, model and profile do not go together."""


class NoPlanError(ZorseError):
    """Nothing in the search space fits; each problem states the smallest missing amount."""

    missing_bytes: int = 0
    """How much more memory makes a plan possible, in all; 0 where memory is not what is missing."""
    bytes_per_gpu: int = 0
    """How much each GPU of `gpu_kinds` lacks."""
    gpu_kinds: tuple[str, ...] = ()
    """The kinds that need it."""

    @property
    def facts(self) -> Mapping[str, object]:  # type: ignore[override]
        """The missing amount in bytes, where memory is what is missing."""
        if not self.missing_bytes:
            return {}
        return {
            "missing_bytes": self.missing_bytes,
            "bytes_per_gpu": self.bytes_per_gpu,
            "gpu_kinds": list(self.gpu_kinds),
        }

    def with_problem(self, problem: Problem) -> "NoPlanError":
        """The same error with one more thing to say."""
        error = NoPlanError(self.title, [*self.problems, problem])
        error.missing_bytes = self.missing_bytes
        error.bytes_per_gpu = self.bytes_per_gpu
        error.gpu_kinds = self.gpu_kinds
        return error
