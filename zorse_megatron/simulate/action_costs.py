"""Costs of all actions of a plan: durations and flows, evaluated once."""

from collections.abc import Mapping, Sequence

from zorse_megatron.costs.interface import (
    NO_TIME,
    WHOLE,
    ComputeCost,
    ModelSection,
    PassTimes,
    RankPart,
    SetComputeCost,
    SetCosts,
)
from zorse_megatron.costs.set_collectives import SetCollectives
from zorse_megatron.costs.stage_formulas import pass_s
from zorse_megatron.schedules.actions import Kind
from zorse_megatron.schema.gpus.gpu import ComputeDtype
from zorse_megatron.simulate.collective_costs import CollectiveCosts
from zorse_megatron.simulate.layer_gathers import GatherPart
from zorse_megatron.simulate.network_loads import NetworkLoads
from zorse_megatron.simulate.rank_sizes import RankSizes
from zorse_megatron.simulate.residency import SteppedUnit
from zorse_megatron.simulate.simulation_errors import SimulationError


class ActionCosts(CollectiveCosts):
    """Durations of computations, and what collectives and copies take."""

    def __init__(
        self,
        sizes: RankSizes,
        compute: ComputeCost,
        loads: NetworkLoads,
        kinds: Sequence[str],
        computes: Mapping[ComputeDtype, ComputeCost],
        *,
        sets: SetCosts | None = None,
        sequence_length: int = 1,
    ) -> None:
        """`kinds`: the kind of GPU of each global rank; `computes`, `sets`: see `simulate`."""
        if len(kinds) != sizes.plan.world_size:
            raise SimulationError(
                f"found {len(kinds)} kinds of GPUs; expected {sizes.plan.world_size}, one per rank"
            )
        super().__init__(sizes, loads, sets)
        self.computes = [
            computes.get(group.compute_dtype, compute) if group.compute_dtype else compute
            for group in sizes.plan.groups
        ]
        """Of each group."""
        self.kinds = tuple(kinds)
        self.sequence_length = sequence_length
        self._inside = (
            None
            if sets is None
            else SetCollectives(
                comm=loads.comm,
                sequence_parallel=sets.sequence_parallel,
                learns_positions=sets.learns_positions,
            )
        )
        self._phases: dict[tuple[str, int, RankPart, int, int], tuple[PassTimes, ...]] = {}
        self._together: dict[tuple[tuple[int, ...], int, bool], PassTimes] = {}

    def phases(self, rank: int, chunk: int) -> tuple[PassTimes, ...]:
        """One micro-batch of the rank through the chunk: layers, embedding, head, recompute.

        Of a rank of a set: what lies between the set's collectives, alike ones together; without
        the collectives where these were not measured with it.
        """
        kind, size = self.kinds[rank], self.sizes.micro_batch_size(rank)
        key = kind, size, self.sizes.part(rank), chunk, self.sizes.recompute_numbers[rank]
        if key not in self._phases:
            own = self._set_compute(rank, chunk)
            if own is None:
                self._phases[key] = (self._pass_times(rank, chunk),)
            else:
                self._phases[key] = self._set_phases(own, rank, chunk)
        return self._phases[key]

    def seconds(self, rank: int, chunk: int, kind: Kind, *, splits: bool) -> Sequence[float]:
        """The phases of a forward, a backward, or a weight gradient, which has one.

        `splits`: whether backwards leave weight gradients out; then both take as long as one whole
        backward, of which each phase gives what it has of the layers' time.
        """
        phases = self.phases(rank, chunk)
        if kind is Kind.FORWARD:
            return [float(each.forward_s) for each in phases]
        weights_s = self._weight_gradients_s(rank, chunk) if splits else 0.0
        if kind is Kind.WEIGHT_GRADIENT:
            return [weights_s]
        backward_s = [float(each.backward_s) for each in phases]
        of_layers = backward_s[:2]  # attention and MLP, or all in one
        share = weights_s / sum(of_layers) if weights_s else 0.0
        return [(1 - share) * each for each in of_layers] + backward_s[2:]

    def forward_part_s(self, rank: int, chunk: int, part: GatherPart) -> Sequence[float]:
        """What one of `gather_parts` has of each phase of a forward."""
        phases_s = self.seconds(rank, chunk, Kind.FORWARD, splits=False)
        own = self._set_compute(rank, chunk)
        compute = own or self.computes[self.sizes.plan.chunks[chunk].group]
        kind, size = self.kinds[rank], self.sizes.micro_batch_size(rank)
        ends: list[tuple[bool, float]] = []
        if chunk == 0:
            ends.append((part.embedding, compute.embedding(kind, size).forward_s))
        if self.sizes.is_last(chunk):
            ends.append((part.head, compute.head(kind, size).forward_s))
        ends_s = [end_s if is_there else 0.0 for is_there, end_s in ends]
        if own is not None:
            return [part.layers * each for each in phases_s[:2]] + ends_s
        layers_s = phases_s[0] - sum(end_s for _, end_s in ends)
        return [part.layers * layers_s + sum(ends_s)]

    def _weight_gradients_s(self, rank: int, chunk: int) -> float:
        compute = self._set_compute(rank, chunk)
        own = compute or self.computes[self.sizes.plan.chunks[chunk].group]
        of_layer = own.weight_gradients_s(self.kinds[rank], self.sizes.micro_batch_size(rank))
        return self.sizes.num_layers(chunk) * of_layer

    def set_collectives(self, ranks: tuple[int, ...], chunk: int, *, gathers: bool) -> PassTimes:
        """What a set communicates inside a computation of the chunk.

        `gathers`: whether its input arrives from another group, in parts.
        """
        key = ranks, chunk, gathers
        if key not in self._together:
            self._together[key] = self._set_collectives(ranks, chunk, gathers=gathers)
        return self._together[key]

    def step_s(self, rank: int) -> float:
        """Optimizer step on all that the rank owns."""
        owned = sum(self.sizes.shards[chunk][rank] for chunk in self.sizes.chunks(rank))
        group, _ = self.sizes.group_and_replica[rank]
        return self.computes[group].step_s(self.kinds[rank], owned)

    def stepped_s(
        self, rank: int, units: Sequence[SteppedUnit], step_s: float
    ) -> Mapping[int, float]:
        """How long each chunk's part of an update takes whose units pass through the GPU.

        The update takes `step_s` in all where nothing has to.

        As `adapter.optimizer.host_state` does it. The unit after the one that is stepped is
        fetched meanwhile; the one before it must have left. Each direction of the link does one
        thing at a time.
        """
        whole = max(1, sum(unit.elements for unit in units))
        now_s = coming_s = left_s = 0.0
        there_s: list[float] = []
        ends_s: dict[int, float] = {}
        for number, unit in enumerate(units):
            now_s = max(now_s, left_s)
            for each in units[len(there_s) : number + 2]:
                coming_s = max(coming_s, now_s) + self.copy_s(rank, each.in_bytes)
                there_s.append(coming_s)
            now_s = max(now_s, there_s[number]) + step_s * unit.elements / whole
            left_s = max(left_s, now_s) + self.copy_s(rank, unit.out_bytes)
            ends_s[unit.chunk] = now_s
        ends_s[units[-1].chunk] = max(now_s, left_s)
        starts_s = [0.0, *ends_s.values()]
        return {
            chunk: end_s - start_s
            for (chunk, end_s), start_s in zip(ends_s.items(), starts_s, strict=False)
        }

    def copy_s(self, rank: int, num_bytes: int) -> float:
        """Bytes between the GPU and host memory, in one direction."""
        return num_bytes / self.loads.comm.host_link_bytes_per_s(rank)

    def _set_collectives(self, ranks: tuple[int, ...], chunk: int, *, gathers: bool) -> PassTimes:
        assert self._inside is not None
        sizes, inside, size = self.sizes, self._inside, self.sizes.micro_batch_size(ranks[0])
        num_bytes, tokens = sizes.boundary_bytes(size, chunk), size * self.sequence_length

        def of(section: ModelSection) -> PassTimes:
            if all(self._is_measured_together(rank, chunk, section) for rank in ranks):
                return NO_TIME
            return inside.of(section, ranks, num_bytes, tokens)

        layer, layers = of("layer"), sizes.num_layers(chunk)
        mode, recomputed = sizes.recompute(ranks[0], chunk)  # if whole layers, as all of the set
        again = recomputed if mode == "full" else 0
        ends = [of("embedding")] if chunk == 0 else []
        ends += [of("head")] if sizes.is_last(chunk) else []
        gather_s = 0.0
        if gathers and sizes.splits_activations and not inside.sequence_parallel:
            gather_s = inside.gather_s(ranks, num_bytes)
        return PassTimes(
            forward_s=gather_s + layers * layer.forward_s + sum(e.forward_s for e in ends),
            backward_s=gather_s
            + layers * layer.backward_s
            + again * layer.forward_s
            + sum(e.backward_s for e in ends),
        )

    def _is_measured_together(self, rank: int, chunk: int, section: ModelSection) -> bool:
        compute = self._set_compute(rank, chunk)
        return compute is not None and compute.includes_collectives(self.kinds[rank], section)

    def _set_compute(self, rank: int, chunk: int) -> SetComputeCost | None:
        """What a rank of a set of several computes with."""
        part = self.sizes.part(rank)
        if self._sets is None or part == WHOLE:
            return None
        dtype = self.sizes.plan.groups[self.sizes.plan.chunks[chunk].group].compute_dtype
        return self._sets.of_rank(part, dtype).compute

    def _set_phases(self, compute: SetComputeCost, rank: int, chunk: int) -> tuple[PassTimes, ...]:
        """Attentions, MLPs, and embedding and head."""
        kind, size = self.kinds[rank], self.sizes.micro_batch_size(rank)
        layers, layer = self.sizes.num_layers(chunk), compute.layer_in_two(kind, size)
        mode, recomputed = self.sizes.recompute(rank, chunk)
        again_s = recomputed * compute.recompute_s(kind, size, mode) if recomputed else 0.0
        whole_s = layer.attention.forward_s + layer.mlp.forward_s
        # What is recomputed selectively is attention, usually.
        share = layer.attention.forward_s / whole_s if mode == "full" and whole_s else 1.0
        of_each = ((layer.attention, share), (layer.mlp, 1.0 - share))
        ends = [compute.embedding(kind, size)] if chunk == 0 else []
        ends += [compute.head(kind, size)] if self.sizes.is_last(chunk) else []
        halves = (
            PassTimes(
                forward_s=layers * half.forward_s,
                backward_s=layers * half.backward_s + part * again_s,
            )
            for half, part in of_each
        )
        return (*halves, *ends)

    def _pass_times(self, rank: int, chunk: int) -> PassTimes:
        """Of a rank that is a set of its own."""
        compute = self.computes[self.sizes.plan.chunks[chunk].group]
        kind, size = self.kinds[rank], self.sizes.micro_batch_size(rank)
        layers, layer = self.sizes.num_layers(chunk), compute.layer(kind, size)
        mode, recomputed = self.sizes.recompute(rank, chunk)
        again_s = recomputed * compute.recompute_s(kind, size, mode) if recomputed else 0
        first = compute.embedding(kind, size) if chunk == 0 else NO_TIME
        last = compute.head(kind, size) if self.sizes.is_last(chunk) else NO_TIME
        ends_s = first.forward_s + last.forward_s, first.backward_s + last.backward_s
        return PassTimes(
            forward_s=pass_s(layers, layer.forward_s, 0, ends_s[0]),
            backward_s=pass_s(layers, layer.backward_s, again_s, ends_s[1]),
        )
