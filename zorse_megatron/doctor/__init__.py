"""Checks on the machine at hand that plans run there as stock Megatron does; no network."""
