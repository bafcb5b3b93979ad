"""Long documents: prompts of many thousand tokens, short answers.

Run it with `locust -f loadgen/scenarios/long_document.py --host URL`.
"""

from loadgen.scenarios.plain import LoadLineShape, ScenarioUser

__all__ = ["LoadLineShape", "LongDocumentUser"]


class LongDocumentUser(ScenarioUser):
    """One user of the workload `long_document`."""

    workload_name = "long_document"
