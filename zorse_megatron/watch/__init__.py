"""Names a rank that is gone within seconds, and ends the job: no rank waits for it in vain.

`start` forks each rank off a small process that stays its parent, and watches it: it learns at once
how the rank ends, whatever the rank is doing, and outlives it. These watchers are joined to that of
rank 0, which decides who is to blame (`root_cause`), has all ranks ended, and prints one line.
"""
