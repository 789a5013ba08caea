"""Adapters and experts on one GPU: time and memory, beside the simulator's, and beside stock.

    python -m scripts.time_on_gpu --out FILE [--only adapters|model|experts ...] [--limit-s 300]

`adapters`: layers of an 8B model, trained whole and by LoRA; times of its parts are measured first.
`model`: all 32 layers by LoRA. `experts`: 4 layers as in OLMoE in bf16, a plan of one rank against
stock, then a small model in fp32 under plans of three ranks that share the GPU. Each job's line is
written as it ends; what fails is told, and the rest goes on. Takes three to eight minutes on an
H100; `--tiny` tries it on a CPU.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from zorse_megatron.doctor.doctor_run import DoctorRun, machine_here
from zorse_megatron.doctor.plans import EXPERTS, ONE_F_ONE_B, gpt_flags, plan_of, replica
from zorse_megatron.doctor.report import Gpu
from zorse_megatron.doctor.timed import predicted, seen_peak_bytes
from zorse_megatron.emulate.rank_jobs import run_spawned
from zorse_megatron.errors import ZorseError
from zorse_megatron.flags.table import WITHOUT_EVALUATION
from zorse_megatron.inputs.lora import LORA_FLAG
from zorse_megatron.plan.plan import Group, Plan, Recompute, Schedule

Flags = tuple[str, ...]
STAGES = ("adapters", "model", "experts")
LORA = (LORA_FLAG, "rank=16,alpha=32,targets=q,k,v,o,gate,up,down")
LLAMA = (
    *("--swiglu", "--disable-bias-linear", "--position-embedding-type", "rope"),
    *("--normalization", "RMSNorm", "--untie-embeddings-and-output-weights"),
    *("--calculate-per-token-loss", *WITHOUT_EVALUATION),
)
H100 = Gpu(name="NVIDIA H100 80GB HBM3", capability=(9, 0), total_bytes=85_017_624_576)
"""Stands for the GPU that a tiny run has not."""
_UNTIMED = 2
"""Iterations at the start that compile and allocate."""


@dataclass(kw_only=True)
class Answers:
    """What is known so far, in a file."""

    path: Path
    known: dict[str, Any] = field(default_factory=dict)

    def attempt(self, name: str, make: Callable[[], Any]) -> Any:
        """Return what `make` returns, noted; None, with the error noted, where it fails."""
        began_s = time.monotonic()
        try:
            value = made = make()
        except (ZorseError, OSError, LookupError, ValueError) as error:
            value, made = {"error": str(error)[-4000:]}, None
        self.known[name] = value
        self.path.write_text(json.dumps(self.known, indent=1, default=str))
        print(f"{name} ({time.monotonic() - began_s:.0f} s): {json.dumps(value, default=str)}")
        return made


def one_rank(layers: int, size: int, count: int, *, recompute: bool = False) -> Plan:
    group = Group(
        replicas=(replica(0, size, count),), recompute=Recompute(mode="full") if recompute else None
    )
    return plan_of((group,), ((0, layers),), ONE_F_ONE_B)


def sized(sizes: Mapping[str, object], more: Sequence[str]) -> Flags:
    usual = {"--lr": 1e-4, "--split": "100,0,0", "--distributed-timeout-minutes": 5}
    return (*gpt_flags(usual | dict(sizes)), *LLAMA, *more)


def timed(run: DoctorRun, name: str, plan: Plan | None, flags: Flags) -> dict[str, Any]:
    """Train; the median iteration, losses and norms, and the first rank's peak of memory."""
    place = run.place(name)
    memory = () if plan is None else ("--zorse-memory", str(place))
    trained = run.trained(name, plan, (*flags, *memory))
    times_s = [s for step, s in trained.elapsed_s.items() if step > _UNTIMED]
    found: dict[str, Any] = {
        "iteration_s": statistics.median(times_s) if times_s else None,
        "losses": list(trained.losses.values()),
        "norms": list(trained.grad_norms.values()),
    }
    if memory:
        found["peak_bytes"] = seen_peak_bytes(place)
    return found


def simulated(gpu: Gpu, plan: Plan, flags: Flags, profile: Path | None) -> dict[str, Any]:
    """Return the same from published figures, or from a profile's."""
    iteration_s, peak_bytes = predicted(plan, gpu, flags, profile)
    return {"iteration_s": iteration_s, "peak_bytes": peak_bytes}


def apart(found: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, float]:
    """How far two runs are from each other, in their worst iteration."""
    losses, norms = (list(zip(found[k], other[k], strict=True)) for k in ("losses", "norms"))
    return {
        "abs_loss": max(abs(a - b) for a, b in losses),
        "relative_norm": max(abs(a / b - 1) for a, b in norms),
    }


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Where jobs run, and at which size."""

    run: DoctorRun
    answers: Answers
    is_tiny: bool

    @property
    def gpu(self) -> Gpu:
        return next(iter(self.run.machine.gpus), H100)

    @property
    def bf16(self) -> Flags:
        """Flags of layers in bf16, which a CPU has as well."""
        own = self.run.machine.layer_flags
        return own if "--bf16" in own else ("--bf16", *own)

    def of_llama(self, plan: Plan, iterations: int, *more: str) -> Flags:
        """An 8B model's layers, as many as the plan has."""
        width, ffn, heads, groups, length, vocabulary = (
            (128, 256, 4, 2, 128, 512) if self.is_tiny else (4096, 14336, 32, 8, 2048, 128256)
        )
        sizes = {
            **{"--num-layers": plan.model.num_layers, "--hidden-size": width},
            **{"--ffn-hidden-size": ffn, "--num-attention-heads": heads, "--seq-length": length},
            **{"--num-query-groups": groups, "--vocab-size": vocabulary},
            **{"--micro-batch-size": plan.groups[0].replicas[0].micro_batch_size},
            **{"--global-batch-size": plan.global_batch_size, "--train-iters": iterations},
        }
        return sized(sizes, ("--group-query-attention", *self.bf16, *more))

    def of_experts(self, *, small: bool) -> Flags:
        """Four layers with experts: of OLMoE's size in bf16, or small ones in fp32."""
        width, ffn, length, size, batch = (
            (256, 256, 256, 1, 8)
            if small
            else (64, 32, 64, 2, 4)
            if self.is_tiny
            else (2048, 1024, 2048, 4, 16)
        )
        sizes = {
            **{"--num-layers": 4, "--hidden-size": width, "--ffn-hidden-size": ffn},
            **{"--num-attention-heads": width // 64 or 1, "--seq-length": length},
            **{"--micro-batch-size": size, "--global-batch-size": batch},
            **{"--train-iters": 3 if small else 7, "--vocab-size": 1024 if small else 32000},
        }
        number, chosen = ("8", "2") if small or self.is_tiny else ("64", "8")
        moe = ("--num-experts", number, "--moe-router-topk", chosen)
        if small:
            exact = tuple(flag for flag in self.run.machine.layer_flags if flag != "--bf16")
            biased = EXPERTS[EXPERTS.index("--moe-router-load-balancing-type") :]
            return sized(sizes, (*moe, "--moe-ffn-hidden-size", str(ffn), *biased, *exact))
        losses = ("--moe-aux-loss-coeff", "0.01", "--moe-z-loss-coeff", "0.001")
        wide = ("--moe-ffn-hidden-size", str(ffn), "--moe-router-dtype", "fp32")
        return sized(sizes, (*moe, *wide, *losses, *self.bf16))


def adapters(bench: Bench) -> None:
    """Whole training beside LoRA, of 8 layers."""
    plan = one_rank(2 if bench.is_tiny else 8, 4, 4, recompute=True)
    profile = bench.run.directory / "profile.json"
    one = bench.of_llama(one_rank(1, 4, 1), 3)
    words = ("profile", "measure", "--out", str(profile), "--max-micro-batch", "4", "--", *one)
    measure = partial(bench.run.run, "profile", "zorse_megatron", words, limit_s=90)
    bench.answers.attempt("measuring the parts", measure)
    for way, more in (("adapters", LORA), ("whole", ())):
        beside(bench, f"8 layers, {way}", plan, bench.of_llama(plan, 6, *more), profile)


def model(bench: Bench) -> None:
    """All layers of the 8B model by LoRA, from random weights."""
    plan = one_rank(3 if bench.is_tiny else 32, 4, 2, recompute=True)
    beside(bench, "32 layers, adapters", plan, bench.of_llama(plan, 5, *LORA), None)


def beside(bench: Bench, name: str, plan: Plan, flags: Flags, profile: Path | None) -> None:
    """A job, and what the simulator says of it."""
    for source, path in (("published", None), ("measured", profile)):
        if source == "published" or (path is not None and path.exists()):
            foresee = partial(simulated, bench.gpu, plan, flags, path)
            bench.answers.attempt(f"{name}, simulated from {source} figures", foresee)
    bench.answers.attempt(name, partial(timed, bench.run, name, plan, flags))


def experts(bench: Bench) -> None:
    """Plans against stock: in time, and to rounding."""
    large, small = bench.of_experts(small=False), bench.of_experts(small=True)
    pair = Group(replicas=(replica(0, 1, 6, 3.0), replica(1, 2, 1)))
    groups = (pair, Group(replicas=(replica(2, 4, 2),)))
    size, count = (2, 2) if bench.is_tiny else (4, 4)
    jobs: tuple[tuple[str, Flags, Mapping[str, Plan]], ...] = (
        ("experts in bf16", large, {"a plan of one rank": one_rank(4, size, count)}),
        (
            "experts in fp32",
            small,
            {
                "2|1": plan_of(groups, ((0, 2), (1, 2)), ONE_F_ONE_B),
                "breadth-first": plan_of(
                    groups, ((0, 1), (1, 2), (0, 1)), Schedule(name="breadth_first")
                ),
            },
        ),
    )
    for name, flags, plans in jobs:
        train = partial(timed, bench.run, f"{name} stock", None, flags)
        stock = bench.answers.attempt(f"{name}, stock", train)
        for who, plan in plans.items():
            train = partial(timed, bench.run, f"{name} {who}", plan, flags)
            found = bench.answers.attempt(f"{name}, {who}", train)
            if stock and found:
                bench.answers.attempt(f"{name}, {who} from stock", partial(apart, found, stock))


def main(argv: Sequence[str] | None = None) -> None:
    """See above."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="+", choices=STAGES, default=list(STAGES))
    parser.add_argument("--limit-s", type=float, default=600.0)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args(argv)
    directory = Path(tempfile.mkdtemp(prefix="time-on-gpu-"))
    run = DoctorRun(
        machine=machine_here(run_spawned, directory),
        run_job=run_spawned,
        directory=directory,
        ends_s=time.monotonic() + options.limit_s,
    )
    bench = Bench(run=run, answers=Answers(path=options.out), is_tiny=options.tiny)
    for each in options.only:
        {"adapters": adapters, "model": model, "experts": experts}[each](bench)


if __name__ == "__main__":
    main()
