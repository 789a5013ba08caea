"""From action lists to tasks: what each action occupies, and what it waits for.

The rules are the executor's (`runtime.executor`), and where the executor does not run an action
yet, those that its word in `schedules.actions` promises:

- A rank has one main stream, which runs its list in order. Beside it there are a collective
  stream, a copy stream to the host and one from the host, and one stream for each direction of
  each pair of ranks. On each stream things run one at a time, in list order.
- A forward or backward runs on the main stream, when the receives that it consumes have arrived
  and the GATHER and the FETCH of its chunk that precede it in the list are done. Of a sharded
  chunk each layer of a forward waits for its own parameters (`layer_gathers`).
- A weight gradient takes its part of the backward, which where it stands apart takes the rest.
- A computation of a tensor-parallel set is one task of all its ranks: it starts when all are ready,
  and between collectives takes as long as on the slowest. Collectives inside layers take idle
  links. A set without sequence parallelism gathers what arrived in parts first.
- Where replicas of a group cut their layers differently, its REDUCEs and GATHERs stop the main
  stream.
- Sends and receives only start a transfer and take no time. The transfer runs when the sender has
  come to its send, the receiver has opened the buffer (`schedules.receive_openings`), and the one
  before it on the same pair and direction is done. With a `Framework` whose transfers block, a
  receive starts at its place, and each stops the main stream until it is done (and a receive until
  the tensor is rebuilt).
- A send must have left before the computation at which it is closed (`schedules.send_closings`), or
  before NORM: the main stream waits there.
- REDUCE and GATHER run on the collective stream, after everything that precedes them in the list:
  they start when all ranks of the group are there, and end on all at once; in a hierarchical group
  each rank waits for its own stages (`stage_tasks`). The main stream goes on; so they overlap with
  computation, unless what follows waits for them. A REDUCE of a chunk that is released, or in 16
  bits, stops the main stream until the REDUCE before it is done, as each of them needs memory of
  its own.
- TIE, SCALE and NORM run on the main stream, after the rank's collectives and FETCHes. TIE swaps
  gradients between owners of the same elements, and ends with the rank's last swap. SCALE is sums
  of one number over all ranks (`Framework`), NORM such a sum.
- Lists are taken from NORM to NORM (`schedules.steady`): first what they have behind it, beside the
  first passes of the next iteration.
- STEP runs on the main stream. State that stays in the host passes through the GPU piece by piece
  meanwhile, and parameters whose shard is in the host come and go with their chunk's pieces
  (`ActionCosts.stepped_s`).
- An OFFLOADG stops the main stream until the REDUCE before it is done and the shard of the OFFLOADG
  before it has left; then the shard is copied on the copy stream to the host, beside all else.
  SCALE waits for the last one. NORM begins with copies of all of them from the host.
- Behind the update the loss is summed over the last group, whose ranks wait for that, and sent to
  the job's last rank, which waits for it; where a `Framework` sums more over all ranks, all wait.
  The sum comes behind the group's GATHERs, unless it is hierarchical: these have communicators of
  their own.
- OFFLOAD and FETCH run on the copy streams, which overlap with all else. An OFFLOAD waits for the
  chunk's GATHER and FETCH, a FETCH for its OFFLOAD. A GATHER stops the main stream until the
  chunk's FETCH is done, and an OFFLOAD that copies until it has. RELEASE takes no time and waits
  for the chunk's GATHER.
- With `offload.activations`, what a forward keeps is copied to the host after it. The copy back is
  asked for as the computation before the backward begins, before what follows in the list. At the
  end of the next forward the main stream waits until it has left. See
  `schedules.activation_offloads` for what stays.

Computation and communication do not slow each other down here: on a GPU, NCCL's kernels take some
of its processors.
"""

from collections.abc import Mapping, Sequence

from zorse_megatron.schedules.actions import Action
from zorse_megatron.schedules.steady import from_norm, num_before_update
from zorse_megatron.simulate.action_costs import ActionCosts
from zorse_megatron.simulate.collective_tasks import CollectiveTasks
from zorse_megatron.simulate.perturb import Perturbation
from zorse_megatron.simulate.rank_tasks import RankTranslator
from zorse_megatron.simulate.set_tasks import SetTasks
from zorse_megatron.simulate.task_graph import Program, TaskGraph
from zorse_megatron.simulate.transfers import MatchedTransfers


def translate(
    lists: Mapping[int, Sequence[Action]],
    costs: ActionCosts,
    perturbation: Perturbation,
    *,
    stands_in: Sequence[int],
) -> Program:
    """Make tasks of the lists; `lists`: rank -> its actions.

    `stands_in`: rank -> that of them whose list stands for its own.

    Raises SimulationError where the lists of different ranks do not fit together.
    """
    graph = TaskGraph()
    collectives = CollectiveTasks(graph, costs, lists, stands_in)
    transfers = MatchedTransfers(graph, costs.sizes, costs.loads)
    sets = SetTasks(graph)
    tracks = {}
    for rank, actions in lists.items():
        translator = RankTranslator(
            rank=rank,
            actions=from_norm(actions),
            num_updating=len(actions) - num_before_update(actions),
            collectives=collectives,
            transfers=transfers,
            sets=sets,
            perturbation=perturbation,
        )
        tracks[rank] = translator.translate()
    transfers.match(tracks)
    collectives.check()
    sets.check()
    return Program(graph=graph, tracks=tracks, capacities_bytes_per_s=costs.loads.capacities)
