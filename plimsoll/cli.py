"""The command line: finds the command, runs it, and turns what went wrong into one clear line and an exit code.

Commands are imported only when called, so that `plimsoll --help` is quick and nothing drags in the load generator.
A command module has `add_arguments(parser)` and `run(arguments) -> exit code`.
"""

import argparse
import difflib
import importlib
import json
import os
import sys
from importlib.metadata import version
from typing import NoReturn, TextIO

from plimsoll.report import clean
from serving.errors import ConfigError, PlimsollError

__all__ = ["COMMANDS", "EXIT_CODES", "main"]

COMMANDS = {
    "budget": "what a card's memory is spent on, and the batch size that fits; before a start",
    "settings": "what a serving file says, said before, and would say to an engine",
    "check": "does the server run what the serving file says? from its start-up log",
    "experiment": "change one setting: restart, check, measure, then keep it or roll it back",
    "ledger": "the history of settings, figures and conclusions beside the serving file",
    "diagnose": "why a start failed or a server died, from its log, and the next step",
    "demo": "a whole stress run on a real llama.cpp server (or a simulated one) that it starts itself",
    "stress": "push load up to the configured batch size and past it; find the load line",
    "simulate": "a simulated engine whose truth is known, over HTTP, until stopped",
    "watch": "the long-running monitor: sample, judge, alert, export",
    "smoke": "the smallest request that proves the server answers, and with its own model",
    "memory": "what one request costs in memory, against the estimate",
    "doctor": "what is installed, which GPUs and engines are seen, and what would get in the way",
}

EXIT_CODES = """exit codes:
  0 pass   1 fail   2 wrong usage or configuration   3 inconclusive   4 could not run   130 interrupted"""

INTERNAL_ERROR = 4
INTERRUPTED = 130


def main(argv: list[str] | None = None) -> int:
    """Run one command line.

    Args:
        argv: arguments without the program's name; those of the process when absent.

    Returns:
        The exit code that `EXIT_CODES` explains.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        print(_overview())
        return 0 if words else 2
    if words[0] in ("-V", "--version"):
        print(f"plimsoll {version('plimsoll')}")
        return 0
    name = words[0]
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"; did you mean '{near[0]}'?" if near else ""
        _complain(f"there is no command '{name}'{hint or ';'} `plimsoll --help` lists them", None, 2)
        return 2
    # A demo is a stress run, and its document is one.
    schema = f"plimsoll.{'stress' if name == 'demo' else name}/1" if "--json" in words else None
    try:
        module = importlib.import_module(f"plimsoll.{name}")
        parser = _Parser(
            prog=f"plimsoll {name}",
            description=COMMANDS[name][0].upper() + COMMANDS[name][1:] + ".",
            epilog=f"{module.EXAMPLES}\n\n{EXIT_CODES}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(parser)
        code: int = module.run(parser.parse_args(words[1:]))
    except PlimsollError as error:
        _complain(str(error), schema, error.exit_code)
        return error.exit_code
    except KeyboardInterrupt:
        _complain("interrupted before there was anything to keep", schema, INTERRUPTED)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of our output went away, as `head` does. What was to be said is lost, so this is no success.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return INTERNAL_ERROR
    except Exception as error:
        if os.environ.get("PLIMSOLL_DEBUG"):
            raise
        where = error.__traceback__
        while where is not None and where.tb_next is not None:
            where = where.tb_next
        place = f"{where.tb_frame.f_code.co_filename}:{where.tb_lineno}" if where else "?"
        _complain(
            f"internal error: {type(error).__name__}: {error} ({place}); set PLIMSOLL_DEBUG=1 for the whole story",
            schema,
            INTERNAL_ERROR,
        )
        return INTERNAL_ERROR
    return code


class _Parser(argparse.ArgumentParser):
    """Complains as the rest of the program does: one line, and a document where one was asked for."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; `{self.prog} --help` explains the options")


def _overview() -> str:
    width = max(map(len, COMMANDS))
    rows = "\n".join(f"  {name:<{width}}  {summary}" for name, summary in COMMANDS.items())
    return (
        "usage: plimsoll COMMAND [options]\n\n"
        "Finds an LLM inference server's load line, proves it before launch, and watches the server afterwards.\n\n"
        f"commands:\n{rows}\n\n"
        "examples:\n"
        "  plimsoll demo\n"
        "  plimsoll stress http://127.0.0.1:8000 --workload interactive --max-batch 48\n"
        "  plimsoll COMMAND --help\n\n"
        f"{EXIT_CODES}"
    )


def _complain(message: str, schema: str | None, code: int) -> None:
    """One line for people on stderr, and one document for programs on stdout when they asked for one."""
    if schema is not None:
        kind = "configuration" if code == ConfigError.exit_code else "interrupted" if code == INTERRUPTED else "error"
        document = {"schema": schema, "verdict": None, "error": {"kind": kind, "message": message}, "exit_code": code}
        _write(json.dumps(document, allow_nan=False), sys.stdout)
    _write(f"plimsoll: error: {clean(message)}", sys.stderr)


def _write(line: str, stream: TextIO) -> None:
    """Print and flush; that nobody reads it, or the disk is full, must not change the exit code."""
    try:
        print(line, file=stream, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


if __name__ == "__main__":
    sys.exit(main())
