import pytest

from scripts.validation.measured_memory import MeasuredMemory
from zorse_megatron.costs.interface import MemoryCost
from zorse_megatron.costs.model_memory import Precision
from zorse_megatron.inputs.profile import PartMemory, Profile, Source

PRECISION = Precision(parameter_bytes=4, gradient_bytes=2, state_bytes=8)


def profile(*parts: str) -> Profile:
    return Profile(
        schema_version=1,
        sources=(Source(name="table", kind="measured"),),
        memory=tuple(
            PartMemory(
                part=part,
                model="m",
                seq_length=8,
                tensor_parallel=2,
                source="table",
                parameters=100 * number,
                activation_elements=10 * number,
                output_elements=number,
            )
            for number, part in enumerate(parts, 1)
        ),
    )


def test_what_was_measured():
    parts = profile("embedding", "layer", "head")
    memory: MemoryCost = MeasuredMemory.of(
        parts, "m", precision=PRECISION, element_bytes=4, tensor_parallel=2
    )
    assert memory.embedding_parameters() == 100
    assert memory.layer_parameters() == 200
    assert memory.head_parameters(tied_on_same_rank=False) == 300
    bytes_of = (memory.parameter_bytes, memory.gradient_bytes, memory.state_bytes)
    assert [size(10) for size in bytes_of] == [40, 20, 80]
    assert memory.activation_bytes(3, "none") == 3 * 20 * 4
    assert memory.head_bytes(3) == 3 * 30 * 4
    assert memory.boundary_bytes(3) == 3 * 1 * 4


def test_what_was_not():
    with pytest.raises(LookupError, match="embedding and the head of m"):
        MeasuredMemory.of(
            profile("layer"), "m", precision=PRECISION, element_bytes=4, tensor_parallel=2
        )
    parts = profile("embedding", "layer", "head")
    with pytest.raises(LookupError, match="tensor parallel 1"):
        MeasuredMemory.of(parts, "m", precision=PRECISION, element_bytes=4)
    memory = MeasuredMemory.of(parts, "m", precision=PRECISION, element_bytes=4, tensor_parallel=2)
    with pytest.raises(LookupError, match="kept whole"):
        memory.activation_bytes(1, "full")
    with pytest.raises(LookupError, match="tied"):
        memory.head_parameters(tied_on_same_rank=True)
