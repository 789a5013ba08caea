"""A long emulated run on a cluster that changes: `python -m scripts.long_run.run`."""
