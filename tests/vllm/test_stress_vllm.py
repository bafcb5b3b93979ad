"""`plimsoll stress` against real vLLM on CPU: the truth is how it was started.

Needs a virtual environment with vLLM (tests/vllm/install.sh) named by PLIMSOLL_VLLM_VENV. When the server cannot be
started the session ends with exit code 77, which says nothing about Plimsoll.
"""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest

from serving.embedded.tiny_model import PRESETS, write_hf

pytestmark = pytest.mark.vllm

START_LIMIT_SECONDS = 300


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.fixture(scope="session")
def venv():
    named = os.environ.get("PLIMSOLL_VLLM_VENV")
    if not named:
        pytest.skip("PLIMSOLL_VLLM_VENV names no environment with vLLM; tests/vllm/install.sh makes one")
    return Path(named)


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    # Not the tiny one: it decodes so fast that vLLM's own front end is the bottleneck, and no batch ever fills.
    folder = tmp_path_factory.mktemp("model") / "small-moe"
    write_hf(folder, PRESETS["small"])
    return folder


@contextmanager
def serving(venv, model, log, *, context, extra=()):
    port = free_port()
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "auto",
    }
    command = [
        *(venv / "bin" / "vllm", "serve", model, "--served-model-name", "tiny", "--dtype", "bfloat16"),
        *("--host", "127.0.0.1", "--port", str(port), "--max-model-len", str(context)),
        *("--max-num-seqs", "8", "--enforce-eager", *extra),
    ]
    with log.open("wb") as output:
        server = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
    try:
        wait_until_ready(server, port, log)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        try:
            server.wait(timeout=30)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def wait_until_ready(server, port, log):
    deadline = time.monotonic() + START_LIMIT_SECONDS
    while time.monotonic() < deadline:
        if server.poll() is not None:
            break
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)  # polling for an event with a deadline, not waiting for time to pass
    tail = log.read_text(errors="replace")[-2000:]
    pytest.exit(f"vLLM did not start (exit code {server.poll()}):\n{tail}", returncode=77)


def stress(url, *arguments):
    command = [sys.executable, "-m", "plimsoll", "stress", url, "--json", "--gpu", "none", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=420, check=False)
    assert done.stdout, f"no document; stderr:\n{done.stderr}"
    result = json.loads(done.stdout)
    assert "load_line" in result, f"{result}\n{done.stderr}"
    for stage in result["stages"]:
        requests = dict(stage["requests"])
        assert requests.pop("issued") == sum(requests.values()), stage
    return done.returncode, result


def test_eight_sequences_are_eight_batch_slots(venv, model, tmp_path):
    log = tmp_path / "vllm.log"
    with serving(venv, model, log, context=2048) as url:
        code, result = stress(
            url,
            *("--log", log, "--workload", "interactive", "--stage-seconds", 12, "--out", tmp_path / "run.db"),
            *("--prompt-tokens", 128, "--output-tokens", 256),
        )
    line = result["load_line"]
    assert (line["configured"], line["measured"], line["bound_by"]) == (8, 8, "batch_slots"), result
    assert (code, result["verdict"]) == (0, "pass")
    over = next(stage for stage in result["stages"] if stage["offered"] == 10)
    assert over["waiting"]["max"] > 0
    assert result["tokens"]["client_completion"] == result["tokens"]["server_completion"]


def test_34_blocks_of_32_tokens_bind_at_the_kv_cache(venv, model, tmp_path):
    log = tmp_path / "vllm.log"
    small = ("--block-size", "32", "--num-gpu-blocks-override", "34")
    with serving(venv, model, log, context=1024, extra=small) as url:
        code, result = stress(
            url,
            *("--log", log, "--workload", "interactive", "--stage-seconds", 9, "--out", tmp_path / "run.db"),
            *("--prompt-tokens", 96, "--output-tokens", 160),
        )
    line = result["load_line"]
    assert line["configured"] == 8
    assert line["bound_by"] == "kv_cache", result
    assert line["measured"] is not None
    assert line["measured"] < 8
    assert (code, result["verdict"]) == (1, "fail")
    assert sum(stage["preemptions"] for stage in result["stages"]) > 0
    assert "KV cache" in result["reason"]
