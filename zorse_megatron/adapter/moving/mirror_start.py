"""What a run starts from: the newest whole copy, or the newest checkpoint if that is not older."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from megatron.training import get_args

from zorse_megatron.adapter.checkpoint.check_before_load import check_before_load
from zorse_megatron.adapter.checkpoint.shared_reads import on_rank_0
from zorse_megatron.adapter.moving.mirror import Mirror
from zorse_megatron.adapter.moving.mirrored_state import joined, unpacked
from zorse_megatron.adapter.moving.plan_left import PlanLeft
from zorse_megatron.adapter.moving.state import SetAside
from zorse_megatron.adapter.plan_run import PlanRun
from zorse_megatron.checkpoints.choice import Load
from zorse_megatron.checkpoints.folder import Checkpoint
from zorse_megatron.checkpoints.position import NONE, position_at_a_look
from zorse_megatron.log import say
from zorse_megatron.migration.mirror.choice import Copy, Whole, newest_whole, what_is_missing

if TYPE_CHECKING:
    from zorse_megatron.adapter.session import PlanSession


@contextmanager
def mirroring(run: PlanRun, session: "PlanSession") -> Iterator[Mirror | None]:
    """For the time of a training; where that comes to its end, nothing stays in memory."""
    if run.mirror is None:
        yield None
        return
    mirror = Mirror(run, session)
    try:
        yield mirror
    except PlanLeft:  # the copies are good until the next plan's first one is whole
        mirror.wait()
        dist.destroy_process_group(mirror.group)
        raise
    except SystemExit as end:  # how stock ends a training that it was told to end, and has saved
        if not end.code:
            mirror.wait()
            mirror.folder.clear()
        raise
    mirror.wait()
    mirror.folder.clear()


def starting_point(
    run: PlanRun, load: Load | None, mirror: Mirror | None
) -> tuple[PlanRun, Load | None, Checkpoint | None]:
    """What to start from: a run with the state from copies, or a checkpoint that is whole.

    A collective call. Raises what `check_before_load` raises.
    """
    whole = None if mirror is None or run.moved is not None else _newest(mirror)
    if mirror is not None and whole is not None and _at_a_look(load) < whole.iteration:
        aside = _read(mirror, whole)
        if aside is not None:
            return replace(run, moved=aside), None, None
        whole = None
    chosen = None if load is None else check_before_load(load)
    if mirror is not None and whole is not None and _position(chosen, load) < whole.iteration:
        aside = _read(mirror, whole)  # the newest checkpoint was damaged
        if aside is not None:
            return replace(run, moved=aside), None, None
    elif whole is not None:
        say(f"mirrored state of iteration {whole.iteration} is not taken: {chosen} is not older")
    return run, load, chosen


def settle(mirror: Mirror, *, is_first: bool) -> None:
    """When the model is there: refuse what cannot be mirrored; keep what has been taken alone.

    `is_first`: this is no plan that another one was left for in these processes.
    """
    mirror.refuse_frozen()
    if mirror.taken is not None:
        mirror.folder.keep_only(mirror.taken.start, mirror.taken.iteration)
    elif is_first:
        mirror.folder.clear()


def setting_up(mirror: Mirror, *, is_first: bool, stock: Callable[..., Any]) -> Any:
    """`setup_model_and_optimizer`, then `settle`."""

    def setup_model_and_optimizer(*args: Any, **kwargs: Any) -> Any:
        made = stock(*args, **kwargs)
        settle(mirror, is_first=is_first)
        return made

    return setup_model_and_optimizer


def writing(mirror: Mirror, stock: Callable[..., bool]) -> Callable[..., bool]:
    """`checkpoint_and_decide_exit`, then a copy if it is time for one and the training goes on."""

    def checkpoint_and_decide_exit(  # noqa: PLR0917  (stock's signature)
        model: Any,
        optimizer: Any,
        opt_param_scheduler: Any,
        iteration: int,
        num_floating_point_operations_so_far: float,
        checkpointing_context: Any,
        train_data_iterator: Any,
    ) -> bool:
        ends = stock(
            model,
            optimizer,
            opt_param_scheduler,
            iteration,
            num_floating_point_operations_so_far,
            checkpointing_context,
            train_data_iterator,
        )
        if not ends and iteration % mirror.every == 0 and iteration < get_args().train_iters:
            mirror.after(
                model, opt_param_scheduler, iteration, num_floating_point_operations_so_far
            )
        return ends

    return checkpoint_and_decide_exit


def _newest(mirror: Mirror) -> Whole | None:
    """The newest iteration of which all copies are on these nodes."""
    mirror.folder.clear_unfinished()
    copies = {each for told in mirror.gathered(list(mirror.folder.copies())) for each in told}
    step = get_args().ckpt_step
    if step is not None:
        say(f"mirrored state is not looked for: --ckpt-step says iteration {step}")
        return None
    whole = newest_whole(copies)
    if whole is None:
        say(f"no mirrored state is taken: {what_is_missing(copies)}; checkpoints are what is left")
    return whole


def _at_a_look(load: Load | None) -> float:
    """The iteration of the newest checkpoint, by names and sizes; one is read where it is taken."""
    if load is None or load.root is None:
        return NONE
    position: float = on_rank_0(partial(position_at_a_look, load.root))
    return position


def _position(chosen: Checkpoint | None, load: Load | None) -> float:
    """Where the run was; what it began with, such as `--pretrained-checkpoint`, is before that."""
    if chosen is None or load is None or chosen.is_release or chosen.root != load.root:
        return NONE
    return chosen.iteration


def _read(mirror: Mirror, whole: Whole) -> SetAside | None:
    """What this rank brings of the copies; None, on all ranks: they cannot be taken."""
    rank, problem, asides = mirror.session.rank, None, {}
    try:
        for old, node in enumerate(whole.nodes):
            if _readers(mirror.nodes, whole)[old] == rank:
                asides[old] = _one(mirror, whole, old, node)
    except Exception as error:  # whatever it is, there are checkpoints
        problem = f"{type(error).__name__}: {error}"
    problems = [each for each in mirror.gathered(problem) if each is not None]
    if problems:
        say(f"mirrored state of iteration {whole.iteration} is not taken: {problems[0]}")
        return None
    bare = None if 0 not in asides else replace(asides[0], held={}, states=(), common=None)
    (first,) = (each for each in mirror.gathered(bare) if each is not None)
    say(
        f"goes on from the state of iteration {whole.iteration} that {len(whole.nodes)} ranks "
        f"have mirrored: it is newer than all checkpoints"
    )
    mirror.taken = whole
    return joined(list(asides.values()), first)


def _one(mirror: Mirror, whole: Whole, old: int, node: str) -> SetAside:
    copy = Copy(
        iteration=whole.iteration,
        world_size=len(whole.nodes),
        start=whole.start,
        rank=old,
        node=node,
    )
    data = mirror.folder.read(copy)
    if data is None:
        raise LookupError(f"the copy of rank {old} has gone from node {node}")
    state = unpacked(data)
    if state.dtypes != mirror.dtypes:
        raise ValueError(
            f"its ranks computed in {', '.join(state.dtypes)}, and these in "
            f"{', '.join(mirror.dtypes)}"
        )
    return state.aside


def _readers(nodes: tuple[str, ...], whole: Whole) -> list[int]:
    """Of each rank that there was: the rank that reads its copy, each as many as its neighbours."""
    reads = [0] * len(nodes)
    readers = []
    for node in whole.nodes:
        here = (rank for rank, name in enumerate(nodes) if name == node)
        reader = min(here, key=lambda rank: (reads[rank], rank))
        reads[reader] += 1
        readers.append(reader)
    return readers


def mirror_hooks(mirror: Mirror, *, is_first: bool) -> tuple[Any, Any]:
    """What is made of `setup_model_and_optimizer` and of `checkpoint_and_decide_exit`."""

    def set_up(stock: Callable[..., Any]) -> Any:
        return setting_up(mirror, is_first=is_first, stock=stock)

    return set_up, partial(writing, mirror)
