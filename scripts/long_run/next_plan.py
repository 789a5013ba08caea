"""`zorse plan --from-status` between two parts of the emulated run, and whether its move pays."""

import json
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from scripts.long_run.machines import FLAGS, PROFILE, Machines
from zorse_megatron.inputs.cluster_yaml import dump_cluster
from zorse_megatron.inputs.status import RUNNING_PLAN_NAME, STATUS_NAME, dump_status, load_status
from zorse_megatron.plan.plan import Plan
from zorse_megatron.plan.plan_file import fingerprint, load_plan, save_plan

# Of the iterations that are left, with the move spread over them.
_LEAST_GAIN = 0.05


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What is to happen next."""

    plan: Plan
    pause_s: float
    """For the move; 0: the run stays."""
    said: str


def next_plan(
    machines: Machines, directory: Path, part: Path, plan: Plan, *, iterations: int
) -> Answer:
    """Plan by the status that a part has left, which ran under `plan`.

    `iterations`: of the whole training. Its own files are written into `directory`.
    """
    directory.mkdir(parents=True, exist_ok=True)
    cluster, out = directory / "cluster.yaml", directory / "next.json"
    cluster.write_text(dump_cluster(machines.cluster))
    # The run's own plan file is that of the tiny model.
    status = replace(load_status(part), plan=fingerprint(plan), ended=False, moves=())
    (directory / STATUS_NAME).write_text(dump_status(status))
    save_plan(plan, directory / RUNNING_PLAN_NAME)
    words = ["plan", "--from-status", str(directory), "--cluster", str(cluster), "--json"]
    words += ["--profile", str(PROFILE), "--out", str(out), "--", *FLAGS]
    command = [sys.executable, "-m", "zorse_megatron", *words]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    move = json.loads(done.stdout)["run"]
    left = iterations - status.iteration
    gain = 1 - (move["next_s"] + move["move_s"] / left) / move["present_s"]
    said = (
        f"{move['present_s']:.4g} s now, {move['next_s']:.4g} s after a move of "
        f"{move['move_s']:.3g} s: {100 * gain:.1f} % of {left} iterations"
    )
    if gain <= _LEAST_GAIN:
        return Answer(plan=plan, pause_s=0.0, said=f"{said}: stays")
    return Answer(plan=load_plan(out), pause_s=move["move_s"], said=f"{said}: moves")
