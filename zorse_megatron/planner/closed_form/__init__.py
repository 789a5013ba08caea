"""Time and memory of device groups and candidates in closed form, without simulation."""
