"""Defaults of Megatron that our own runs of small models turn off, each with its reason.

The rule is to run as a user's job does: with evaluations, two data loader workers for each data
set, and the handler of signals that `zorse launch` adds. tests/megatron/test_launched_jobs.py does,
and tests/slurm. Costs are of stock, with 4 layers of width 64 and 6 iterations, on two cores.
"""

WITHOUT_EVALUATION = ("--eval-interval", "1000", "--eval-iters", "0")
"""A job of 0.7 s would take 7 s with the 100 iterations that it evaluates by default at its end,
and a corpus of `--split 100,0,0` has no samples for them. Megatron has no default interval.
"""
WITHOUT_WORKERS = ("--num-workers", "0")
"""Two to six more processes for each rank: a job of 0.7 s takes 1.2 s."""
WITHOUT_DROPOUT = ("--attention-dropout", "0", "--hidden-dropout", "0")
"""Layouts draw other random numbers, and losses are compared to rounding."""
