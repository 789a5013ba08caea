"""What a move is expected to send, against a count of every element."""

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.strategies import lowerable_plans
from zorse_megatron.inputs.cluster_yaml import parse_cluster
from zorse_megatron.inputs.model import ModelShape
from zorse_megatron.live.move_costs import move_cost, owners
from zorse_megatron.plan.plan import Plan


def model_of(plan: Plan) -> ModelShape:
    return ModelShape(
        name="tiny",
        num_layers=plan.model.num_layers,
        hidden_size=4,
        ffn_hidden_size=8,
        num_attention_heads=1,
        num_query_groups=1,
        kv_channels=4,
        vocab_size=16,
        seq_length=8,
    )


def elements_of(plan: Plan, model: ModelShape) -> list[set[tuple[str, int]]]:
    """Rank -> every element that it owns."""
    return [
        {
            (name, block.offset[0] + at)
            for name, blocks in owned.items()
            for block in blocks
            for at in range(block.size[0])
        }
        for _, owned in sorted(owners(plan, model).items())
    ]


@settings(max_examples=examples(30))
@given(plan=lowerable_plans())
def test_every_element_has_one_owner(plan: Plan) -> None:
    model = model_of(plan)
    owned = elements_of(plan, model)
    assert sum(map(len, owned)) == model.num_parameters == len(set().union(*owned))


SMALL = st.lists(
    lowerable_plans(max_world=3, max_groups=2, num_layers=st.just(4)), min_size=2, max_size=6
)


@settings(max_examples=examples(30))
@given(plans=SMALL)
def test_what_new_owners_lack_is_sent(plans: list[Plan]) -> None:
    before = plans[0]
    after = next((each for each in plans[1:] if each.world_size == before.world_size), before)
    model = model_of(before)
    cluster = parse_cluster(
        f"nodes: [{{count: {before.world_size}, gpus: 1 x T4, nics: 80 Gb/s}}]".encode()
    )
    cost = move_cost(before, after, model, cluster, rebuild_s=7.0)
    old, new = elements_of(before, model), elements_of(after, model)
    lacking = [len(theirs - had) for had, theirs in zip(old, new, strict=True)]
    assert cost.sent_bytes == cost.between_nodes_bytes == 12 * sum(lacking)
    copied = max(map(len, old)) + max(map(len, new))  # to the host, and up again
    copied_s = 12 * copied / cluster.nodes[0].host_link_bytes_per_s
    # Of equal terms, which are summed in another order.
    assert cost.seconds > (7.0 + 12 * max(lacking) / 10e9 + copied_s) * (1 - 1e-12)
