"""Offline batches: nobody waits, throughput is what counts.

Run it with `locust -f loadgen/scenarios/offline_batch.py --host URL`.
"""

from loadgen.scenarios.plain import LoadLineShape, ScenarioUser

__all__ = ["LoadLineShape", "OfflineBatchUser"]


class OfflineBatchUser(ScenarioUser):
    """One user of the workload `offline_batch`."""

    workload_name = "offline_batch"
