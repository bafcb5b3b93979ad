"""What is known of inference engines, one table each, and the conversations that use the tables."""

from serving.engines.base import (
    PROXY,
    Complaint,
    Dialect,
    Engine,
    Limits,
    Reading,
    SidePage,
    Source,
    TargetFacts,
)
from serving.engines.exchange import ENGINES, ScrapeFailure, probe, scrape, startup_facts

__all__ = [
    "ENGINES",
    "PROXY",
    "Complaint",
    "Dialect",
    "Engine",
    "Limits",
    "Reading",
    "ScrapeFailure",
    "SidePage",
    "Source",
    "TargetFacts",
    "probe",
    "scrape",
    "startup_facts",
]
