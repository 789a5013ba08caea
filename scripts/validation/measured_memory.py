"""Memory of a model whose parts were all measured: no shape, no formula."""

from dataclasses import dataclass

from zorse_megatron.costs.interface import ModelSection, RecomputeMode
from zorse_megatron.costs.model_memory import BytesByPrecision, Precision
from zorse_megatron.inputs.profile import PartMemory, Profile


@dataclass(frozen=True, kw_only=True)
class MeasuredMemory(BytesByPrecision):
    """`MemoryCost` of entries of a profile; sizes are those of one tensor-parallel rank."""

    embedding: PartMemory
    layer: PartMemory
    head: PartMemory
    precision: Precision
    element_bytes: int

    @classmethod
    def of(
        cls,
        profile: Profile,
        model: str,
        *,
        precision: Precision,
        element_bytes: int,
        tensor_parallel: int = 1,
    ) -> "MeasuredMemory":
        """Find the parts. Raises LookupError for one that the profile does not have."""
        parts = {
            entry.part: entry
            for entry in profile.memory
            if (entry.model, entry.tensor_parallel) == (model, tensor_parallel)
        }
        missing = [part for part in ("embedding", "layer", "head") if part not in parts]
        if missing:
            raise LookupError(
                f"found no memory of the {' and the '.join(missing)} of {model} with tensor "
                f"parallel {tensor_parallel} in the profile; expected embedding, layer and head"
            )
        return cls(
            embedding=parts["embedding"],
            layer=parts["layer"],
            head=parts["head"],
            precision=precision,
            element_bytes=element_bytes,
        )

    def layer_parameters(self) -> int:
        """Number of parameters of one transformer layer."""
        return self.layer.parameters

    def embedding_parameters(self) -> int:
        """Number of parameters of the embedding."""
        return self.embedding.parameters

    def head_parameters(self, *, tied_on_same_rank: bool) -> int:
        """Number of parameters of the final norm and the head, as measured where nothing is tied.

        Raises LookupError for a tied model: the entry does not say whether it counts the table.
        """
        if tied_on_same_rank:
            raise LookupError(
                f"found a tied table in {self.head.model}; expected none, as measured"
            )
        return self.head.parameters

    def frozen_parameters(self, section: ModelSection, *, tied_on_same_rank: bool = False) -> int:
        """None: all were trained."""
        return 0

    def activation_bytes(
        self, micro_batch_size: int, mode: RecomputeMode, kind: str | None = None
    ) -> int:
        """What one layer allocated and kept, on any kind. Raises LookupError for recomputation."""
        if mode != "none":
            raise LookupError(f"found recomputation {mode!r}; measured was only what is kept whole")
        return micro_batch_size * self.layer.activation_elements * self.element_bytes

    def saved_tensor_bytes(
        self, micro_batch_size: int, mode: RecomputeMode, kind: str | None = None
    ) -> tuple[int, ...]:
        """All in one: tensors were not measured apart. Raises LookupError for recomputation."""
        return (self.activation_bytes(micro_batch_size, mode, kind),)

    def delayed_bytes(self, micro_batch_size: int) -> int:
        """Raises LookupError: that was not measured."""
        raise LookupError("found split_backward; measured was only what forwards keep")

    def arriving_bytes(self, micro_batch_size: int) -> int:
        """As sent: these layers have no experts."""
        return self.boundary_bytes(micro_batch_size)

    def boundary_bytes(self, micro_batch_size: int) -> int:
        """One activation between two layers, whole."""
        return micro_batch_size * self.embedding.output_elements * self.element_bytes

    def head_bytes(self, micro_batch_size: int) -> int:
        """What head and loss allocated."""
        return micro_batch_size * self.head.activation_elements * self.element_bytes
