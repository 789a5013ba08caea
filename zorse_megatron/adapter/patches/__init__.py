"""What is rebound in Megatron.

`registry.py` lists every record; `rebind.py` checks, applies and undoes them. The records say what
and why; what takes a name's place is made where it belongs, and passed in. Nothing here imports
torch or Megatron until a record is applied.
"""
