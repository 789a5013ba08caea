"""A good plan as JSON values, to be spoilt by the tests."""

import json
from typing import Any

from zorse_megatron.errors import PlanError, Problem
from zorse_megatron.plan.plan import Plan
from zorse_megatron.plan.plan_file import parse_plan

SOURCE = "plan.json"


def good() -> dict[str, Any]:
    """Five ranks in three groups (2, 1, 2), 12 layers, 24 samples; a fresh copy at each call."""

    def replica(rank: int, size: int, count: int, weight: float) -> dict[str, Any]:
        return {
            "ranks": [rank],
            "micro_batch_size": size,
            "num_microbatches": count,
            "shard_weight": weight,
        }

    return {
        "schema_version": 2,
        "global_batch_size": 24,
        "model": {"num_layers": 12},
        "groups": [
            {"name": "a", "replicas": [replica(0, 4, 4, 3.0), replica(1, 2, 4, 1.0)]},
            {"replicas": [replica(2, 3, 8, 1.0)]},
            {"replicas": [replica(4, 3, 6, 1.0), replica(3, 1, 6, 1.0)]},
        ],
        "chunks": [
            {"group": 0, "layers": [0, 5]},
            {"group": 1, "layers": [5, 7]},
            {"group": 2, "layers": [7, 12]},
        ],
        "schedule": {"name": "1f1b"},
    }


def load(value: Any) -> Plan:
    """Load a plan from JSON values."""
    return parse_plan(json.dumps(value).encode(), source=SOURCE)


def problems_in(data: bytes) -> tuple[Problem, ...]:
    """Return the problems of a file with this content."""
    try:
        parse_plan(data, source=SOURCE)
    except PlanError as error:
        return error.problems
    return ()


def problems(value: Any) -> tuple[Problem, ...]:
    """Return the problems of JSON values."""
    return problems_in(json.dumps(value).encode())


def only_problem(value: Any) -> Problem:
    """Return the one problem of JSON values; fails if there are none or more."""
    (problem,) = problems(value)
    return problem
