"""Chat: short prompts, and answers that are read as they appear.

Run it with `locust -f loadgen/scenarios/interactive.py --host URL`.
"""

from loadgen.scenarios.plain import LoadLineShape, ScenarioUser

__all__ = ["InteractiveUser", "LoadLineShape"]


class InteractiveUser(ScenarioUser):
    """One user of the workload `interactive`."""

    workload_name = "interactive"
