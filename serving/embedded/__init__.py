"""A real inference engine in a child process: llama.cpp's server out of the `xllamacpp` wheel, and a model for it.

What `plimsoll demo` and the engine tests run against. It needs no GPU, no download and no compiler, and is the same
server that `llama-server` is: the same endpoints, metrics, logs and failures.
"""

import contextlib
import importlib.util
import json
import os
import select
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

from serving.embedded.tiny_model import PRESETS, TinyShape, cached_gguf
from serving.errors import ConfigError, TargetError

__all__ = ["EmbeddedServer"]


class EmbeddedServer:
    """A llama.cpp server that this process owns; a context manager that stops it.

    `start` and `stop` block for as long as the model takes to load (the tiny ones: under a second). From asyncio, call
    `await asyncio.to_thread(EmbeddedServer.start, ...)`. The server dies with this process, however that ends, and
    ignores Ctrl-C: the run that uses it decides when to stop it.

    Attributes:
        url: base URL, `http://127.0.0.1:PORT`.
        pid: process id of the server.
        model: the GGUF file it serves.
        log_path: where its log goes.
    """

    def __init__(self, child: subprocess.Popen[bytes], url: str, model: Path, log_path: Path) -> None:
        self._child = child
        self.url = url
        self.pid = child.pid
        self.model = model
        self.log_path = log_path

    @classmethod
    def start(
        cls,
        model: Path | None = None,
        *,
        log_path: Path,
        cache_dir: Path,
        shape: str | TinyShape = "demo",
        experts: int | None = None,
        slots: int = 8,
        context_tokens_per_slot: int = 2048,
        total_context_tokens: int | None = None,
        kv_unified: bool = False,
        ready_timeout_s: float = 120.0,
    ) -> Self:
        """Start the server on a free port of 127.0.0.1 and return once it answers.

        Args:
            model: a GGUF file to serve; without it a model of `shape` is made in `cache_dir`.
            log_path: file for llama.cpp's log; overwritten.
            cache_dir: folder that keeps made models.
            shape: a name in `tiny_model.PRESETS` (`tiny`, `demo`, `small`), or a shape.
            experts: experts per layer in place of the shape's own; 0 for a dense model.
            slots: requests decoded at once, llama.cpp's batch limit.
            context_tokens_per_slot: prompt and answer of one request, tokens.
            total_context_tokens: KV cache in all, in place of `slots * context_tokens_per_slot`.
            kv_unified: let the slots share one KV cache instead of owning equal parts of it. With a small
                `total_context_tokens` it runs full, and llama.cpp breaks off answers with an error event in the stream.
            ready_timeout_s: how long loading may take, seconds.

        Raises:
            ConfigError: xllamacpp is not installed, or an argument cannot be used.
            TargetError: the server did not start.
        """
        if importlib.util.find_spec("xllamacpp") is None:
            raise ConfigError("the embedded engine needs the xllamacpp package: pip install 'plimsoll[demo]'")
        total = slots * context_tokens_per_slot if total_context_tokens is None else total_context_tokens
        if slots < 1 or total < slots:
            raise ConfigError(f"cannot serve {slots} slots with a context of {total} tokens in all; both start at 1")
        if model is None:
            model = cached_gguf(cache_dir, _resolved(shape, experts))
            alias = "tiny-moe" if "moe" in model.name else "tiny"
        elif model.is_file():
            alias = model.stem
        else:
            raise ConfigError(f"model file {model} does not exist; name a GGUF file")
        command = [
            *(sys.executable, "-P", "-m", "serving.embedded.server", os.fspath(model)),
            *("--alias", alias, "--slots", str(slots), "--context", str(total)),
            *(["--kv-unified"] if kv_unified else []),
        ]
        try:
            log_path.parent.mkdir(parents=True, exist_ok=True)
            with log_path.open("wb") as log:
                child = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    start_new_session=True,
                )
        except OSError as error:
            raise ConfigError(f"cannot write the engine's log {log_path}: {error.strerror or error}") from error
        server = cls(child, "", model, log_path)
        try:
            server.url = server._await_url(ready_timeout_s)
        except BaseException:
            server.stop()
            raise
        return server

    def stop(self) -> None:
        """End the server and wait until it is gone; streams in progress are cut. Harmless when it is gone already."""
        for pipe in (self._child.stdin, self._child.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()  # the child exits when its standard input ends
        try:
            self._child.wait(timeout=2)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()

    def running(self) -> bool:
        """Whether the server process is still there."""
        return self._child.poll() is None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _await_url(self, timeout_s: float) -> str:
        assert self._child.stdout is not None  # noqa: S101 - it was opened as a pipe
        descriptor, line = self._child.stdout.fileno(), b""
        deadline = time.monotonic() + timeout_s
        while not line.endswith(b"\n"):
            readable, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
            if not readable:
                raise TargetError(
                    f"the embedded engine was not ready after {timeout_s:g} s; its log is {self.log_path}"
                )
            piece = os.read(descriptor, 4096)
            if not piece:
                raise TargetError(
                    f"the embedded engine did not start: {self._first_complaint()} (log: {self.log_path})"
                )
            line += piece
        url: str = json.loads(line)["url"]
        return url

    def _first_complaint(self) -> str:
        lines = self.log_path.read_text(encoding="utf-8", errors="replace").splitlines()
        errors = [line.partition(" E ")[2] for line in lines if " E " in line]  # the first is the cause of the rest
        return (errors[:1] or lines[-1:] or ["it said nothing"])[0].strip()[:300]


def _resolved(shape: str | TinyShape, experts: int | None) -> TinyShape:
    if isinstance(shape, str):
        if shape not in PRESETS:
            raise ConfigError(f"unknown model shape {shape!r}; known are {', '.join(PRESETS)}")
        shape = PRESETS[shape]
    return shape if experts is None else replace(shape, experts=experts)
