"""From one plan to another with the state in memory: who sends what to whom, and what it takes.

Needs neither torch nor Megatron: the ranks compute it from what each owns under either plan, and
so does a test.
"""
