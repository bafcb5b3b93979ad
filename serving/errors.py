"""What may be raised on purpose.

    PlimsollError
    |- ConfigError      the caller's mistake: flag, settings file, plan       exit 2
    |- TargetError      the target cannot be used before the run began        exit 4
    |- RecordError      a run file or history cannot be written or read       exit 4
    `- NotifyError      a notification could not be delivered

A measured failure (a request that failed, a scrape that timed out) is data and never raised.
Messages say what is wrong, where, and what to do.
"""

__all__ = ["ConfigError", "NotifyError", "PlimsollError", "RecordError", "TargetError"]


class PlimsollError(Exception):
    """Base of all errors raised on purpose; `exit_code` is what the command line returns."""

    exit_code = 4


class ConfigError(PlimsollError):
    """The caller's mistake: a flag, a settings file or a plan."""

    exit_code = 2


class TargetError(PlimsollError):
    """The target cannot be used: unreachable, not an inference API, or without metrics."""


class RecordError(PlimsollError):
    """A run file or history cannot be written or read."""


class NotifyError(PlimsollError):
    """A notification was not delivered; `permanent` means that a retry cannot help."""

    def __init__(self, message: str, *, permanent: bool = False) -> None:
        super().__init__(message)
        self.permanent = permanent
