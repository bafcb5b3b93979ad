"""What a start-up log says of a server: read by one reader, and compared with what the serving file says."""

from serving.startup.comparison import FieldCheck, Outcome, compare
from serving.startup.estimates import Estimate, as_started, compare_estimates
from serving.startup.facts import (
    PHASES,
    Clamp,
    DeviceBuffers,
    Phase,
    PhaseMemory,
    RankMemory,
    StartupFacts,
    memory_by_phase,
    place_on_clock,
)
from serving.startup.reader import logged_limits, read_startup

__all__ = [
    "PHASES",
    "Clamp",
    "DeviceBuffers",
    "Estimate",
    "FieldCheck",
    "Outcome",
    "Phase",
    "PhaseMemory",
    "RankMemory",
    "StartupFacts",
    "as_started",
    "compare",
    "compare_estimates",
    "logged_limits",
    "memory_by_phase",
    "place_on_clock",
    "read_startup",
]
