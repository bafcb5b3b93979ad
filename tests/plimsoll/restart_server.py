"""A restart script as an operator may have one: end the server that runs, start one for the settings, come to an end.

    python restart_server.py simulated FOLDER PORT [arguments of `plimsoll simulate`]
    python restart_server.py embedded FOLDER PORT MODEL.gguf
    python restart_server.py stop FOLDER

It is told what to start by the environment that `plimsoll experiment` gives a restart command. The server's process id
is in FOLDER/pid, its log in FOLDER/server.log.
"""

import argparse
import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path


def end(pid_file):
    """End the old server and wait until it is gone."""
    try:
        pid = int(pid_file.read_text())
    except (FileNotFoundError, ValueError):
        return
    for number, seconds in ((signal.SIGTERM, 5), (signal.SIGKILL, 5)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
        until = time.monotonic() + seconds
        while time.monotonic() < until and runs(pid):
            time.sleep(0.02)
    pid_file.unlink(missing_ok=True)


def runs(pid):
    """Whether the process lives; one that only waits to be reaped does not."""
    try:
        return "(zombie)" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def launch(command, folder, *, log=None):
    """Start a server that outlives this script, and that leaves its own process id, whenever this script is killed."""
    note = ["/bin/sh", "-c", 'echo $$ > "$0"; exec "$@"', str(folder / "pid")]
    with Path(log or os.devnull).open("wb") as output:
        subprocess.Popen(
            [*note, *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            cwd=folder,
        )


def serve_embedded(model, port, slots, context):
    """llama.cpp's own server out of the xllamacpp wheel, on a fixed port, until it is killed."""
    import threading

    from xllamacpp import CommonParams, Server

    params = CommonParams()
    params.model.path = model
    params.model_alias = {"tiny"}
    params.hostnames = ["127.0.0.1"]
    params.port = port
    params.n_parallel = slots
    params.n_ctx = context
    params.kv_unified = False
    params.endpoint_metrics = params.endpoint_slots = params.endpoint_props = True
    params.n_threads_http = 64
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.cache_ram_mib = 0
    params.cache_idle_slots = False
    params.fit_params = False
    params.n_gpu_layers = 0
    params.ui = False
    params.offline = True
    server = Server(params)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    while server.listening_address:
        threading.Event().wait(3600)


def main(words):
    mode, folder = words[0], Path(words[1])
    if mode == "serve-embedded":
        serve_embedded(words[1], *map(int, words[2:5]))
        return
    end(folder / "pid")
    if mode == "simulated":
        settings = os.environ["PLIMSOLL_SETTINGS"]
        command = [sys.executable, "-P", "-m", "plimsoll", "simulate", "--settings", settings]
        launch([*command, "--port", words[2], "--log", str(folder / "server.log"), *words[3:]], folder)
    elif mode == "embedded":
        parser = argparse.ArgumentParser()
        parser.add_argument("--parallel", type=int)
        parser.add_argument("--ctx-size", type=int)
        asked, _ = parser.parse_known_args(shlex.split(os.environ["PLIMSOLL_ENGINE_ARGS"]))
        command = [sys.executable, __file__, "serve-embedded", words[3], words[2]]
        launch([*command, str(asked.parallel), str(asked.ctx_size)], folder, log=folder / "server.log")


if __name__ == "__main__":
    main(sys.argv[1:])
