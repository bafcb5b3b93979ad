"""Why a server did not start, or died: read from its log alone.

signs        what failures look like, one table
reader       a log of any size, read once at the speed of a text search
conclusion   from the signs of one start to its cause
advice       what to say about a cause, what to do and what to leave alone
"""

from serving.diagnosis.reader import LogReader, diagnose
from serving.diagnosis.words import (
    Confidence,
    DiagnosedLog,
    Diagnosis,
    EarlierStart,
    Evidence,
    Failure,
    Phase,
    State,
)

__all__ = [
    "Confidence",
    "DiagnosedLog",
    "Diagnosis",
    "EarlierStart",
    "Evidence",
    "Failure",
    "LogReader",
    "Phase",
    "State",
    "diagnose",
]
