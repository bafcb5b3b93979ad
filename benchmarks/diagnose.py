"""How fast `plimsoll diagnose` reads a log, and in how much memory, beside a plain read of the same file.

    python benchmarks/diagnose.py [--megabytes 200]

Each case is a file of one kind, read in a child process by the command's own function and, for comparison, only read.
Figures are seconds of processor time, which on a busy machine say more than the clock, and the child's largest resident
size less what an empty child takes.
"""

import argparse
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

LINES = 20_000


def steady(rnd: random.Random, number: int) -> str:
    """Months of access and statistics lines."""
    if number % 10 < 6:
        return f'INFO:     127.0.0.1:{rnd.randint(30000, 60000)} - "POST /v1/chat/completions HTTP/1.1" 200 OK'
    return (
        f"(APIServer pid=1201) INFO 11-29 15:{number % 60:02}:{number % 60:02} [loggers.py:271] Engine 000: Avg prompt throughput: "
        f"{rnd.random() * 4000:.1f} tokens/s, Avg generation throughput: {rnd.random() * 900:.1f} tokens/s, Running: {number % 48} reqs, "
        f"Waiting: 0 reqs, GPU KV cache usage: {rnd.random() * 100:.1f}%, Prefix cache hit rate: 0.0%"
    )


def llamacpp(rnd: random.Random, number: int) -> str:
    """Slots of llama.cpp, several lines a request."""
    return (
        f"0.{number % 60:02}.{rnd.randint(100, 999)}.{rnd.randint(100, 999)} I slot print_timing: id  {number % 8} | task {number} | "
        f"       eval time =     {rnd.random() * 900:.2f} ms /    64 tokens (    {rnd.random() * 9:.2f} ms per token)"
    )


def requests(rnd: random.Random, number: int) -> str:
    """Every request with its identifier in hexadecimal."""
    return (
        f"INFO 11-29 15:00:{number % 60:02} [async_llm.py:261] Added request chatcmpl-{rnd.getrandbits(128):032x} with prompt length "
        f"{rnd.randint(10, 4000)}."
    )


def prompts(rnd: random.Random, number: int) -> str:
    """Every line another text, as a server that logs prompts writes."""
    words = " ".join(
        "".join(rnd.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(rnd.randint(2, 9))) for _ in range(60)
    )
    return f"INFO 11-29 15:00:{number % 60:02} [logger.py:39] Received request cmpl-{number}: prompt: '{words}', params: SamplingParams(n=1)"


def errors(rnd: random.Random, number: int) -> str:
    """Refused requests and out of memory in millions, each with another identifier."""
    if number % 2:
        return f"0.{number % 60:02}.000.000 E srv    send_error: task id = {number}, error: request ({rnd.randint(3000, 9000)} tokens) exceeds the available context size (2048 tokens), try increasing it"
    return (
        f"(VllmWorker TP{number % 8} pid={number}) ERROR 11-29 15:00:00 [x.py:1] req {rnd.getrandbits(64):016x}: torch.OutOfMemoryError: CUDA out of "
        "memory. Tried to allocate 224.00 MiB. GPU 0 has a total capacity of 11.53 GiB of which 187.75 MiB is free."
    )


def refusals(rnd: random.Random, number: int) -> str:
    """One request in twenty is refused, with the traceback that vLLM writes for it."""
    if number % 20:
        return f'INFO:     127.0.0.1:{rnd.randint(30000, 60000)} - "POST /v1/chat/completions HTTP/1.1" 200 OK'
    prefix = f"ERROR 11-29 15:00:{number % 60:02} [serving_chat.py:{number % 900}]"
    folder = "/usr/local/lib/python3.12/dist-packages/vllm/entrypoints/openai"
    return "\n".join(
        f"{prefix} {text}"
        for text in (
            "Traceback (most recent call last):",
            f'  File "{folder}/serving_chat.py", line 210, in create_chat_completion',
            "    ) = await self._preprocess_chat(",
            f'  File "{folder}/serving_engine.py", line 501, in _preprocess_chat',
            f"ValueError: This model's maximum context length is 8192 tokens. However, you requested {number} tokens",
        )
    )


def unlike_errors(rnd: random.Random, number: int) -> str:
    """Errors that are all spelt differently."""
    word = "".join(rnd.choice("ghijklmnopqrstuvwxyz") for _ in range(12))
    return f"ERROR 11-29 15:00:00 [serving.py:{number % 900}] RuntimeError: CUDA out of memory in {word} for customer {word[::-1]}"


CASES: tuple[Callable[[random.Random, int], str], ...] = (
    steady,
    llamacpp,
    requests,
    prompts,
    errors,
    refusals,
    unlike_errors,
)


def write(path: Path, case: Callable[[random.Random, int], str], megabytes: int) -> None:
    rnd = random.Random(1)
    # The texts of a small file come again; that they are many is what counts, so these get more lines of their own.
    own = LINES * 2 if case in (prompts, unlike_errors) else LINES
    lines = "\n".join(case(rnd, number) for number in range(own)) + "\n"
    block = lines.encode()
    with path.open("wb") as file:
        while file.tell() < megabytes * 1_000_000:
            file.write(block)


def plain_read(path: Path) -> None:
    with path.open("rb") as file:
        while file.read(1 << 20):
            pass


def child(what: str, path: Path) -> None:
    """Runs in a process of its own; prints seconds and bytes."""
    from serving.diagnosis import diagnose  # imported by all kinds of children, so that its size cancels out

    work = {"nothing": lambda _: None, "read": plain_read, "diagnose": diagnose}[what]
    began = time.process_time()
    work(path)
    took = time.process_time() - began
    # Not getrusage: what the parent held before the child became itself counts there.
    peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    print(took, int(peak.split()[1]) * 1024)


def measure(what: str, path: Path) -> tuple[float, int]:
    answer = subprocess.run(
        [sys.executable, __file__, "--child", what, str(path)], capture_output=True, text=True, check=True
    )
    seconds, size = answer.stdout.split()
    return float(seconds), int(size)


def rows(megabytes: int) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        for case in CASES:
            path = Path(folder) / "server.log"
            write(path, case, megabytes)
            size = path.stat().st_size / 1e6
            _, empty = measure("nothing", path)
            read, _ = measure("read", path)
            took, largest = measure("diagnose", path)
            yield (
                f"{case.__name__:14} {size / read:8,.0f} MB/s read {size / took:8,.0f} MB/s diagnosed   "
                f"{largest / 1e6:6.1f} MB in all, {max(0, largest - empty) / 1e6:5.1f} MB for the log"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--child", nargs=2, metavar=("WHAT", "FILE"))
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.child[0], Path(arguments.child[1]))
        return
    for row in rows(arguments.megabytes):
        print(row)


if __name__ == "__main__":
    main()
