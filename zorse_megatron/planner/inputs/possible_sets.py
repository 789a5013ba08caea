"""Which tensor-parallel sets a model can be cut for."""

from zorse_megatron.planner.inputs.search_inputs import Inputs


def may_join(inputs: Inputs, degree: int) -> bool:
    """Whether sets of so many ranks can hold parts of the model at all."""
    groups, length = inputs.model.num_query_groups, inputs.model.seq_length
    most = inputs.space.max_tensor_parallel
    if inputs.sets is None or groups is None or groups < degree:
        return False
    if most is not None and degree > most:
        return False
    return not (inputs.sets.sequence_parallel and (length is None or length % degree))


def parts_are_equal(inputs: Inputs, degree: int) -> bool:
    """Whether so many ranks can hold equal parts of everything."""
    model = inputs.model
    sizes = (model.num_query_groups, model.ffn_hidden_size, model.vocab_size)
    return all(size is not None and size % degree == 0 for size in sizes)
