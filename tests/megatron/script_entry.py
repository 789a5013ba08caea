"""The script that the first word names, as `python SCRIPT.py` runs it, with Megatron imported."""

import runpy
import sys

if __name__ == "__main__":
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
