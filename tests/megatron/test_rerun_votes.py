"""Whether a step is run again is decided as by stock, with the sum of its tokens."""

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from tests.megatron import tiny_gpt
from tests.megatron.preloaded import run_megatron_ranks
from tests.megatron.test_reduction_start import HostWaits

# By step: who asks in the first run, and what each says after the second: to go on, to save.
STEPS = (
    ((), (), ()),
    ((0,), (0, 1), ()),
    ((), (), ()),
    ((1,), (1,), ()),
    ((0, 1), (), (0,)),
)


def _decide(with_ours: bool) -> tuple[list[Any], list[int], int]:
    """What each run is followed by and leads to, tokens of steps, and all-reduces."""
    from megatron.core import rerun_state_machine as stock

    from zorse_megatron.adapter.patches.rebind import REGISTRY
    from zorse_megatron.adapter.rerun_votes import RerunVotes

    tiny_gpt.start()
    stock.destroy_rerun_state_machine()
    stock.initialize_rerun_state_machine(mode=stock.RerunMode.VALIDATE_RESULTS)
    machine, rank, votes = stock.get_rerun_state_machine(), dist.get_rank(), RerunVotes()
    said, counted, sums = [], [], Counter[str]()
    plain = dist.all_reduce

    def all_reduce(*args: Any, **kwargs: Any) -> Any:
        sums["all"] += 1
        return plain(*args, **kwargs)

    dist.all_reduce = all_reduce
    hooks = {"rerun_votes": votes.answering}
    with REGISTRY.applied(hooks) if with_ours else nullcontext():
        for asking, going_on, saving in STEPS:
            num_runs = 0
            while machine.should_run_forward_backward(None):
                num_runs += 1
                machine.rerun_requested = rank in asking
                machine.continue_requested = num_runs > 1 and rank in going_on
                machine.checkpoint_requested = num_runs > 1 and rank in saving
                tokens = torch.tensor(rank + num_runs, dtype=torch.int)
                _sum_of(votes if with_ours else None)(tokens)
                counted.append(tokens.item())
                said.append((num_runs, machine.state.name))
            said.append((machine.state.name, machine.should_checkpoint_and_exit()))
    dist.all_reduce = plain
    stock.destroy_rerun_state_machine()
    return said, counted, sums["all"]


def _sum_of(votes: Any) -> Callable[[torch.Tensor], Any]:
    if votes is None:
        return dist.all_reduce
    from zorse_megatron.adapter.data_parallel.ddp import NotedNorms
    from zorse_megatron.adapter.step_sums import StepSums

    def summed(tokens: torch.Tensor) -> None:
        sums = StepSums()
        part = sums.add(tokens)
        votes.cast(sums, NotedNorms(()), tokens.device)
        sums.reduce(dist.group.WORLD)
        tokens.copy_(part.on_device[0])

    return summed


def test_votes_are_summed_with_the_tokens() -> None:
    """Stock's decisions and tokens, with a sum less for each first run."""
    of_stock, ours = (run_megatron_ranks(2, _decide, with_ours) for with_ours in (False, True))
    for (said, counted, sums), (as_said, as_counted, fewer) in zip(of_stock, ours, strict=True):
        assert as_said == said and as_counted == counted
        assert sums - fewer == len(STEPS)
    decided = [state for _, state in of_stock[0][0]]
    assert any(isinstance(each, tuple) and each[0] for each in decided), "a checkpoint is asked for"


def _gradients(mode: str) -> list[Any]:
    """For finite gradients, then for NaN of rank 1: what comes of it, and how often the host waits.

    After the passes, and after the norm that all ranks know.
    """
    from megatron.core import rerun_state_machine as stock

    from zorse_megatron.adapter.data_parallel.ddp import NotedNorms
    from zorse_megatron.adapter.patches.rebind import REGISTRY
    from zorse_megatron.adapter.rerun_votes import RerunVotes
    from zorse_megatron.adapter.step_sums import StepSums

    tiny_gpt.start()
    rank, found = dist.get_rank(), []
    for value in (1.0, float("nan")):
        stock.destroy_rerun_state_machine()
        stock.initialize_rerun_state_machine(mode=stock.RerunMode(mode))
        machine, votes = stock.get_rerun_state_machine(), RerunVotes()
        machine.first_iteration_complete = True
        norms = [torch.tensor(2.0), torch.tensor(value if rank else 1.0)]
        groups = [SimpleNamespace(noted_norms=[norm]) for norm in norms]
        assert machine.should_run_forward_backward(None)
        with HostWaits() as host, REGISTRY.applied({"rerun_votes": votes.answering}):
            sums = StepSums()
            votes.cast(sums, NotedNorms(groups), torch.device("cpu"))
            sums.reduce(dist.group.WORLD)
            again = machine.should_run_forward_backward(None)
            waits = host.found.total()
            try:
                votes.look_after(value)
            except RuntimeError as error:
                found.append("NaN in local grad norm" in str(error))
        found.append((again, machine.rerun_requested, waits))
        assert not any(group.noted_norms for group in groups)
    stock.destroy_rerun_state_machine()
    return found


def test_the_host_looks_at_gradients_only_where_they_are_bad() -> None:
    first, second = run_megatron_ranks(2, _gradients, "validate_results")
    assert first[0] == second[0] == (False, False, 1), "a wait for the votes, and no other"
    assert first[1][:2] == (True, False) and second[1][:2] == (True, True)
    first, second = run_megatron_ranks(2, _gradients, "disabled")
    assert first == [(False, False, 0), (False, False, 0)]
    assert second == [(False, False, 0), True, (False, False, 0)], "stock's message"
