"""Rules of recomputation and offloading that tie values of a plan together."""

from collections.abc import Iterator

from zorse_megatron.errors import Problem
from zorse_megatron.schema.plan.memory_settings import settings_in
from zorse_megatron.schema.plan.plan import Group, Plan, Recompute, Replica


def memory_setting_problems(plan: Plan) -> Iterator[Problem]:
    """Yield every setting that contradicts another."""
    for where, recompute in _recomputes(plan):
        if recompute.num_layers is not None and recompute.mode != "full":
            yield Problem(
                where=f"{where}.recompute.num_layers",
                found=f'{recompute.num_layers} with mode "{recompute.mode}"',
                expected='num_layers only with mode "full"',
                remedy="Remove num_layers or change the mode.",
            )
    for number, group in enumerate(plan.groups):
        for index, replica in enumerate(group.replicas):
            yield from _rank_problems(f"groups[{number}].replicas[{index}]", group, replica)


def _recomputes(plan: Plan) -> Iterator[tuple[str, Recompute]]:
    """All that the plan says of recomputation, with its place."""
    for number, group in enumerate(plan.groups):
        here = f"groups[{number}]"
        if group.recompute:
            yield here, group.recompute
        for index, replica in enumerate(group.replicas):
            inner = f"{here}.replicas[{index}]"
            if replica.recompute:
                yield inner, replica.recompute
            for at, own in enumerate(replica.rank_settings or ()):
                if own.recompute:
                    yield f"{inner}.rank_settings[{at}]", own.recompute


def _rank_problems(where: str, group: Group, replica: Replica) -> Iterator[Problem]:
    """One entry per rank; recomputed layers of a set communicate, so all of its ranks have them."""
    degree = len(replica.ranks)
    if replica.rank_settings is not None and len(replica.rank_settings) != degree:
        yield Problem(
            where=f"{where}.rank_settings",
            found=f"{len(replica.rank_settings)} entries",
            expected=f"{degree}, one per rank of the replica",
            remedy="Give one entry per rank in the order of ranks ({} for one without settings of "
            "its own), or leave it out.",
        )
        return
    found = [settings_in(group, replica, at).recompute for at in range(degree)]
    whole = [each if each and each.mode == "full" else None for each in found]
    if len(set(whole)) > 1:
        yield Problem(
            where=f"{where}.rank_settings",
            found='recompute with mode "full" that differs between ranks '
            f"({', '.join(map(_said, found))})",
            expected='mode "full" with the same num_layers on all ranks of the set, or on none',
            remedy="Ranks of a set communicate inside each layer, also when it is recomputed: say "
            'it in the replica, or choose between "none" and "selective" by rank.',
        )


def _said(recompute: Recompute | None) -> str:
    if recompute is None:
        return "as the training command"
    return recompute.mode + (f" {recompute.num_layers}" if recompute.num_layers else "")
