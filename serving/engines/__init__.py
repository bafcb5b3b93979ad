"""What is known of inference engines, one table each, and the conversations that use the tables."""

from serving.engines.base import (
    PROXY,
    Complaint,
    Dialect,
    Engine,
    Limits,
    LogDump,
    LogFact,
    LogRule,
    LogTable,
    Reading,
    SidePage,
    Source,
    TargetFacts,
)
from serving.engines.exchange import ENGINES, ScrapeFailure, probe, scrape

__all__ = [
    "ENGINES",
    "PROXY",
    "Complaint",
    "Dialect",
    "Engine",
    "Limits",
    "LogDump",
    "LogFact",
    "LogRule",
    "LogTable",
    "Reading",
    "ScrapeFailure",
    "SidePage",
    "Source",
    "TargetFacts",
    "probe",
    "scrape",
]
