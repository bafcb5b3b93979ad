"""The child process that is the embedded engine: llama.cpp's own HTTP server out of the `xllamacpp` wheel.

Run as `python -P -m serving.embedded.server MODEL.gguf`. Once it answers, it prints one line of JSON with its `url` on
standard output. It lives until its standard input closes, which the kernel does even when the parent is killed.
llama.cpp logs to standard error.
"""

import argparse
import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve until standard input closes; never returns."""
    parser = argparse.ArgumentParser(prog="python -m serving.embedded.server", description=__doc__)
    parser.add_argument("model", help="GGUF file")
    parser.add_argument("--alias", default="embedded", help="model name to serve under")
    parser.add_argument("--slots", type=int, default=8, help="requests decoded at once")
    parser.add_argument("--context", type=int, default=16_384, help="context of all slots together, tokens")
    parser.add_argument("--kv-unified", action="store_true", help="let all slots draw on one shared KV cache")
    options = parser.parse_args(arguments)

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which still has requests to drain
    threading.Thread(target=_exit_with_parent, daemon=True).start()

    from xllamacpp import CommonParams, Server

    params = CommonParams()
    params.model.path = options.model
    params.model_alias = {options.alias}
    params.hostnames = ["127.0.0.1"]
    params.port = 0
    params.n_parallel = options.slots
    params.n_ctx = options.context
    params.kv_unified = options.kv_unified
    params.endpoint_metrics = params.endpoint_slots = params.endpoint_props = True
    params.n_threads_http = 64  # every waiting stream holds a thread; with the default few, /metrics waits too
    params.cpuparams.n_threads = 1  # ggml's workers spin: two on a busy pair of cores crawl
    params.cpuparams_batch.n_threads = 1
    params.cache_ram_mib = 0  # else finished prompts pile up in memory, which would look like a leak
    params.cache_idle_slots = False
    params.fit_params = False  # else the context could shrink without a word
    params.n_gpu_layers = 0
    params.ui = False
    params.offline = True
    try:
        server = Server(params)
    except RuntimeError as error:  # it says "failed to init"; the reason is in the log already
        sys.exit(str(error))

    print(json.dumps({"url": server.listening_address}), flush=True)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # nobody reads the pipe from here on
    threading.Event().wait()


def _exit_with_parent() -> None:
    with contextlib.suppress(OSError):
        while os.read(sys.stdin.fileno(), 4096):
            pass
    os._exit(0)  # an orderly shutdown would wait for streams that nobody reads any more


if __name__ == "__main__":
    main()
