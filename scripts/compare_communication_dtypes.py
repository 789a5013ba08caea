"""What it is worth that groups send gradients in 16 bits, on the emulated cluster mini-c.

    python scripts/compare_communication_dtypes.py

Plans llama-3b (float16, 128 samples of 512 tokens, layer times of `examples/mini-profile.json`) as
one group across both regions (`cephalo`), and as our planner does, and emulates each plan with
gradients in fp32 and in bf16 in every group. Prints the table of docs/performance.md.
"""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import get_args

from zorse_megatron.emulate.emulator import System, emulator
from zorse_megatron.emulate.tiny_model import TinyTraining
from zorse_megatron.inputs.cluster_yaml import load_cluster
from zorse_megatron.inputs.model import MODELS
from zorse_megatron.inputs.profile import load_profile
from zorse_megatron.plan.plan import Plan
from zorse_megatron.planner.find_plan import find_plan
from zorse_megatron.planner.inputs.search_inputs import Inputs, make_inputs
from zorse_megatron.planner.outcome import Strategy
from zorse_megatron.planner.simulate_plan import simulate_plan

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
BATCH, LENGTH, ITERATIONS = 128, 512, 3
MODEL = replace(MODELS["llama-3b"], seq_length=LENGTH)


def main() -> None:
    """Emulate four runs, about a minute each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--strategies", nargs="+", choices=get_args(Strategy), default=("cephalo", "zorse")
    )
    inputs = make_inputs(
        load_cluster(EXAMPLES / "mini-c.yaml"),
        MODEL,
        load_profile(EXAMPLES / "mini-profile.json"),
        global_batch_size=BATCH,
        dtype="float16",
    )
    print("| Plan, emulated on CPU | Gradients sent in fp32 | in bf16 | |\n|---|---|---|---|")
    for strategy in parser.parse_args().strategies:
        plan = find_plan(inputs, strategy=strategy).plan
        wide_s, narrow_s = (both_s(each, inputs) for each in (plan, in_bf16(plan)))
        faster = 100 * (1 - narrow_s[0] / wide_s[0])
        print(
            f"| `{strategy}`: {len(plan.groups)} groups | {said(wide_s)} | {said(narrow_s)} | "
            f"{faster:+.1f} % faster |",
            flush=True,
        )


def in_bf16(plan: Plan) -> Plan:
    """The plan with 16-bit gradients in all groups that reduce any."""
    groups = tuple(
        replace(group, grad_reduce_dtype="bf16") if len(group.replicas) > 1 else group
        for group in plan.groups
    )
    return replace(plan, groups=groups)


def both_s(plan: Plan, inputs: Inputs) -> tuple[float, float]:
    """An iteration as emulated, and as simulated."""
    training = TinyTraining(model=MODEL, global_batch_size=BATCH, iterations=ITERATIONS)
    system = System(name="plan", gpus=tuple(range(plan.world_size)), plan=plan)
    with emulator(inputs, training) as emulated:
        found_s = emulated.run(system).iteration_s
    return found_s, simulate_plan(inputs, plan).iteration_s


def said(both: tuple[float, float]) -> str:
    """For people."""
    return f"{both[0]:.4g} s, simulated {both[1]:.4g} s"


if __name__ == "__main__":
    main()
