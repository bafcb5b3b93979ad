"""What is known of a restart: whether another server serves, and that a command's words hold no secret."""

import asyncio
import socket
from dataclasses import replace
from types import SimpleNamespace

import pytest

from monitor.http import parse_url
from monitor.sampler import Tick
from plimsoll import restarting
from plimsoll.restarting import (
    Before,
    LogMark,
    _is_new,
    _refuses,
    listening_sockets,
    run_restart,
)
from serving.clock import SystemClock

OLD = Tick(
    1, up=True, values={"generation_tokens_total": 900.0}, server_mark=None, process_mark="process 7 started 70 ticks"
)
START = "INFO 11-29 12:00:00 [api_server.py:1] vLLM API server version 0.32.0\n"
TAKEN = "OSError: [Errno 98] error while attempting to bind on address ('0.0.0.0', 8000): address already in use\n"


@pytest.mark.parametrize(
    ("before", "tick", "log", "is_new"),
    [
        (OLD, replace(OLD, process_mark="process 8 started 90 ticks"), "", True),
        (OLD, OLD, "", False),
        # A second server that wrote its start into the log does not make the old one that answers new.
        (OLD, OLD, START, False),
        (replace(OLD, server_mark="a"), replace(OLD, server_mark="b"), "", True),
        (
            replace(OLD, server_mark="a", process_mark=None),
            replace(OLD, server_mark="a", process_mark=None),
            START,
            False,
        ),
        # One process that supervises engines: the counters begin anew.
        (OLD, replace(OLD, values={"generation_tokens_total": 3.0}), "", True),
        # Behind a forwarder only the log tells, and not of a start that failed.
        (replace(OLD, process_mark=None), replace(OLD, process_mark=None), "", False),
        (replace(OLD, process_mark=None), replace(OLD, process_mark=None), START, True),
        (replace(OLD, process_mark=None), replace(OLD, process_mark=None), START + TAKEN, False),
        # It was there and hung.
        (replace(OLD, up=False, values={}, failure="timeout"), OLD, START, False),
    ],
)
def test_a_server_is_new_only_by_what_cannot_be_the_old_ones(tmp_path, before, tick, log, is_new):
    path = tmp_path / "log"
    mark = LogMark.now(path)
    path.write_text(log)
    assert _is_new(Before(before, frozenset()), tick, mark, "vllm") is is_new


def listener(port=0):
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    made.bind(("127.0.0.1", port))
    made.listen()
    return made


def test_two_servers_that_share_a_port_are_seen():
    with listener() as old:
        base = parse_url(f"http://127.0.0.1:{old.getsockname()[1]}")
        before = listening_sockets(base)
        assert len(before) == 1
        with listener(base.port):
            now = listening_sockets(base)
        assert (len(now), before < now) == (2, True)


def test_what_answers_is_not_new_while_the_old_server_still_listens_beside_it(monkeypatch, tmp_path):
    async def converse(*_):
        return SimpleNamespace(engine="vllm", model="m", generated=True)

    async def look(*_):
        return replace(OLD, process_mark="process 8 started 90 ticks")

    monkeypatch.setattr(restarting, "converse", converse)
    monkeypatch.setattr(restarting, "look", look)
    monkeypatch.setattr(restarting, "_POLL_SECONDS", 0.001)

    def wait(sockets):
        monkeypatch.setattr(restarting, "listening_sockets", lambda _: frozenset(sockets))
        return asyncio.run(
            restarting.wait_until_new(
                None,
                parse_url("http://127.0.0.1:9"),
                SystemClock(),
                model=None,
                before=Before(OLD, frozenset({"1"})),
                log=LogMark.now(tmp_path / "log"),
                engine="vllm",
                limit_seconds=0.01,
            )
        )

    told = wait({"1", "2"})
    assert "two servers listen at port 9" in told
    assert wait({"2"}).engine == "vllm"
    assert wait({"1"}).engine == "vllm"  # one socket for good, as a supervisor or systemd holds it


def test_a_server_that_is_stuck_does_not_count_as_gone():
    with listener() as stuck:
        base = parse_url(f"http://127.0.0.1:{stuck.getsockname()[1]}")
        assert not asyncio.run(_refuses(base))
    assert asyncio.run(_refuses(base))
    assert listening_sockets(base) == frozenset()


@pytest.mark.parametrize(
    "words",
    ["HF_TOKEN=hf_abcdefghijk123", "exec vllm serve --api-key topsecret99", "Authorization: Bearer topsecret99"],
)
def test_what_a_restart_command_prints_is_told_without_its_secrets(words):
    problem = asyncio.run(run_restart(f"echo '{words}'; exit 3", {}, 10))
    assert problem is not None
    assert problem.startswith("the restart command ended with code 3: ")
    assert "[redacted]" in problem
    assert "hf_abc" not in problem
    assert "topsecret" not in problem
