"""New counts of micro-batches for a plan whose replicas are not as fast as it was made for.

Needs neither torch nor the planner. Measured seconds go in; a plan that differs in counts only, and
its action lists, come out: see docs/rebalance.md.
"""
