"""`plimsoll smoke URL`: the smallest request that proves the server answers and generates."""

import argparse
import asyncio
import json
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.markup import escape

from monitor.http import converse, open_session, parse_url
from plimsoll.report import clean
from serving.engines import probe
from serving.smoke import smoke

__all__ = ["EXAMPLES", "add_arguments", "run"]

EXAMPLES = """examples:
  plimsoll smoke http://127.0.0.1:8000
  plimsoll smoke http://127.0.0.1:8000 --model hy3 --json"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("url", metavar="URL", help="the server's base URL")
    parser.add_argument("--model", help="model name to ask for (default: the server's first)")
    parser.add_argument("--json", action="store_true", help="print one JSON document on stdout")


def run(arguments: argparse.Namespace) -> int:
    """Ask once. Exit code 0 when the server generated text, 1 when it answered without."""
    result = asyncio.run(_ask(arguments.url, arguments.model))
    if arguments.json:
        print(json.dumps(result, allow_nan=False))
    else:
        good = result["verdict"] == "pass"
        Console(soft_wrap=True).print(
            f"[{'green' if good else 'red'}]{result['verdict']}[/]  {result['target']['url']}  "
            + escape(clean(result["reason"])),
            highlight=False,
        )
    return 0 if result["verdict"] == "pass" else 1


async def _ask(url: str, model: str | None) -> dict[str, Any]:
    base = parse_url(url)
    async with open_session() as session:
        facts = await converse(session, base.text, probe(model, where=base.text))
        answer = await converse(session, base.text, smoke(facts.model))
    reason = answer.reason or "it generates"
    return {
        "schema": "plimsoll.smoke/1",
        "target": {"url": base.text, "engine": facts.engine, "version": facts.version, "model": facts.model},
        "verdict": "pass" if answer.generated else "fail",
        "reason": reason,
        "answer": asdict(answer),
    }
