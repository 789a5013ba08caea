"""What goes wrong in a simulation."""


class SimulationError(Exception):
    """Action lists that cannot be executed, or inputs that do not fit the plan."""
