"""Lists of actions from the words that they print as."""

from zorse_megatron.schedule.actions import ActionLists, parse_action


def parse_action_lists(text: str) -> ActionLists:
    """Read back what `str(action_lists)` wrote."""
    ranks = []
    for number, line in enumerate(text.splitlines()):
        head, _, actions = line.partition(":")
        assert head == f"rank {number}", line
        ranks.append(tuple(map(parse_action, actions.split())))
    return ActionLists(ranks=tuple(ranks))
