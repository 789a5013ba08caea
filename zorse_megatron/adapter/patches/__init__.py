"""What is rebound in Megatron. Nothing here imports torch or Megatron until a record is applied."""
