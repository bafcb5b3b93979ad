"""What to say about a cause: the sentence with its figures, the one next step, and what to leave alone.

Advice follows from what memory is made of. Weights are fixed by the model, its quantisation and its split. The KV cache
gets what is left under the memory limit, so its size follows from the limit and from the weights, and what one request
needs of it from the context length. Workspace follows from tokens per step and from the batch. A knob that does not
move the part that ran out is named under `leave_alone`, because it is what people turn first.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from serving.diagnosis.signs import Sign
from serving.diagnosis.words import Failure, Phase

__all__ = ["Advice", "advise"]

Figure = float | int | str
_GIB = 1 << 30
_HIGHEST_UTILIZATION = 0.95
"""Above this, the parts of the engine that are outside its own account run out of memory themselves."""


@dataclass(frozen=True, slots=True)
class Advice:
    """What to say about a cause.

    Attributes:
        title: the class for people.
        cause: one sentence.
        next_step: the one thing to do.
        leave_alone: what not to touch, and why.
        facts_used: figures of the start that the advice was worked out from.
        doubts: what in the figures speaks against it.
    """

    title: str
    cause: str
    next_step: str
    leave_alone: tuple[str, ...]
    facts_used: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Knobs:
    """What an engine calls the settings that advice is about, and which of them it has.

    Attributes:
        context: the longest request, or the whole cache.
        batch: requests at once.
        utilization: what limits the memory of a card.
        split: cards that share the model.
        step: tokens of a step.
        takes_what_is_asked: layers are put on cards as told and the cache is as large as asked for; there is no share
            of the card whose rest becomes the cache.
        steps_size_workspace: the workspace follows from the tokens of a step.
    """

    context: str = "max_model_len"
    batch: str = "max_batch_size"
    utilization: str = "the memory limit"
    split: str = "the tensor parallel size"
    step: str = "the tokens of one step"
    takes_what_is_asked: bool = False
    steps_size_workspace: bool = False


_KNOBS: Mapping[str, _Knobs] = {
    "vllm": _Knobs(
        "max_model_len", "max_num_seqs", "gpu_memory_utilization", "tensor_parallel_size", "max_num_batched_tokens",
        steps_size_workspace=True,
    ),
    "sglang": _Knobs(
        "--context-length", "--max-running-requests", "--mem-fraction-static", "--tp-size", "--chunked-prefill-size",
        steps_size_workspace=True,
    ),
    "llamacpp": _Knobs(
        "--ctx-size", "--parallel", "--n-gpu-layers", "--tensor-split", "--ubatch-size", takes_what_is_asked=True
    ),
    "tgi": _Knobs(
        "--max-total-tokens",
        "--max-concurrent-requests",
        "--cuda-memory-fraction",
        "--num-shard",
        "--max-batch-prefill-tokens",
        steps_size_workspace=True,
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Case:
    sign: Sign
    figures: Mapping[str, Figure]
    engine: str | None
    phase: Phase
    answered: int | None
    host: bool

    @property
    def knobs(self) -> _Knobs:
        return _KNOBS.get(self.engine or "", _Knobs())

    def number(self, name: str) -> float | None:
        figure = self.figures.get(name)
        return float(figure) if isinstance(figure, int | float) else None

    def whole(self, name: str) -> int | None:
        figure = self.figures.get(name)
        return figure if isinstance(figure, int) else None

    def size(self, name: str) -> str | None:
        number = self.number(name)
        return None if number is None else _size(number)

    @property
    def smaller_weights(self) -> str:
        """What to do where weights are too large for their cards."""
        split = self.whole("tensor_parallel_size") or 1
        return (
            f"make the weights smaller on each card: {self.knobs.split} {2 * split} instead of {split}, or weights in "
            "fewer bits"
        )

    @property
    def shortage(self) -> str:
        """`1.74 GiB were asked for when 605 MiB of 23.57 GiB were free on GPU 1`, as far as it is known."""
        asked, free, total, gpu = (self.figures.get(key) for key in ("asked_bytes", "free_bytes", "total_bytes", "gpu"))
        where = "in main memory" if self.host else "on the card" if gpu is None else f"on GPU {gpu}"
        if asked is None:
            return f"no memory was left {where}"
        text = f"{self.size('asked_bytes')} more were asked for {where}"
        if free is not None:
            text += f" when {self.size('free_bytes')}" + (
                f" of {self.size('total_bytes')}" if total is not None else ""
            )
            text += " were free"
        return text

    @property
    def after(self) -> str:
        """How a sentence about a serving server begins."""
        if self.answered is None:
            return ""
        if self.answered == 0:
            return "before any request was answered, "
        return f"after {self.answered:,} answered request{'' if self.answered == 1 else 's'}, "


_RESTART = "restarting as it is: the same start fails the same way"


def advise(
    failure: Failure,
    sign: Sign,
    figures: Mapping[str, Figure],
    *,
    engine: str | None,
    phase: Phase = Phase.UNKNOWN,
    answered: int | None = None,
    host: bool = False,
) -> Advice:
    """What to say about a failure.

    Args:
        failure: its class.
        sign: the row of the table that named it.
        figures: what the evidence and the start-up lines tell.
        engine: whose log it is.
        phase: what was being done.
        answered: requests answered before it, if the server was serving.
        host: the memory that ran out is the machine's and not a card's.
    """
    case = _Case(sign, figures, engine, phase, answered, host)
    title, write = _WRITERS[failure]
    advice = write(case)
    cause = _filled(sign.cause, figures) or advice.cause
    step = _filled(sign.next_step, figures) or advice.next_step
    return Advice(title, cause, step, advice.leave_alone, advice.facts_used, advice.doubts)


def _filled(template: str, figures: Mapping[str, Figure]) -> str:
    """A sign's own sentence, if all of its figures are known."""
    if not template:
        return ""
    shown = {
        name: _size(figure) if name.endswith("_bytes") and not isinstance(figure, str) else figure
        for name, figure in figures.items()
    }
    try:
        return template.format_map(shown)
    except KeyError:
        return ""


def _size(number: float) -> str:
    if abs(number) >= _GIB:
        return f"{number / _GIB:,.2f} GiB"
    return f"{number / (1 << 20):,.0f} MiB"


def _say(
    cause: str, next_step: str, *leave_alone: str, facts: tuple[str, ...] = (), doubts: tuple[str, ...] = ()
) -> Advice:
    return Advice("", cause, next_step, leave_alone, facts, doubts)


# ---- weights


def _weights_unreadable(case: _Case) -> Advice:
    path = case.figures.get("path")
    place = path or "the model's folder"
    steps = {
        "missing": f"check that {place} exists where the server runs (inside the container: the mount), with every "
        "shard that its index names",
        "broken": f"fetch {place if path else 'that file'} again and compare size and hash with its source",
        "format": "give the server a file in the format it reads",
        "quantisation": "take weights whose quantisation this release supports",
        "mismatch": "take config.json and all shards from one source: their tensors or their quantisation do not "
        "belong together",
    }
    expected, found = case.whole("expected_tensors"), case.whole("found_tensors")
    cause = "the weights cannot be read"
    if expected is not None and found is not None:
        cause = f"the file has {found} tensors, and its model has {expected}"
    elif case.figures.get("tensor"):
        cause = f"tensor {case.figures['tensor']} is not as the model's configuration says"
    return _say(
        cause,
        steps.get(case.sign.kind, f"check the files in {place} against their source"),
        "batch size, context length and memory limit: no memory was asked for yet",
        _RESTART,
    )


def _weights_out_of_memory(case: _Case) -> Advice:
    cause = f"the weights do not fit: {case.shortage}"
    if case.host:
        step = "free main memory, or take weights in a smaller quantisation"
    elif case.knobs.takes_what_is_asked:
        free = case.size("free_at_start_bytes")
        step = "offload fewer layers to the card: lower --n-gpu-layers" + (
            f" until the model buffer is below {free}" if free else ""
        )
    else:
        step = case.smaller_weights
    doubts: tuple[str, ...] = ()
    total, own, free_bytes = case.number("total_bytes"), case.number("own_bytes"), case.number("free_bytes")
    if total and own and free_bytes is not None and total - own - free_bytes > 0.1 * total:
        others = _size(total - own - free_bytes)
        step = f"stop the other process that holds {others} of this card (`nvidia-smi` names it)"
        doubts = (f"other processes hold {others} of the card",)
    leave = (
        ()
        if case.knobs.takes_what_is_asked or case.host
        else (f"{case.knobs.utilization}: weights take what they take",)
    )
    return _say(
        cause,
        step,
        f"{case.knobs.batch} and {case.knobs.context}: they size the KV cache, which was not reached",
        *leave,
        _RESTART,
        facts=("free_at_start_bytes",),
        doubts=doubts,
    )


def _memory_taken(case: _Case) -> Advice:
    free, total, wanted, limit = (
        case.number(name) for name in ("free_bytes", "total_bytes", "wanted_bytes", "utilization_ratio")
    )
    cause, step = (
        "the card's memory is held by another process",
        "stop the other process on this card (`nvidia-smi` names it)",
    )
    if free is not None and total and wanted is not None and limit is not None:
        cause = f"{case.knobs.utilization} {limit:g} wants {_size(wanted)} of the card, and {_size(free)} of "
        cause += f"{_size(total)} are free"
        share = math.floor(100 * free / total) / 100
        step = f"stop the process that holds the other {_size(total - free)} (`nvidia-smi` names it), or set "
        step += f"{case.knobs.utilization} to {share:.2f} at most"
    return _say(
        cause,
        step,
        f"{case.knobs.context}, {case.knobs.batch} and quantisation: the engine gave up before it loaded anything",
    )


# ---- KV cache


def _kv_cache_unallocated(case: _Case) -> Advice:
    if case.knobs.takes_what_is_asked:
        return _llamacpp_cache(case, "the KV cache cannot be made")
    limit, available, total = (case.number(name) for name in ("utilization_ratio", "available_bytes", "total_bytes"))
    before, after = case.number("before_weights_bytes"), case.number("after_weights_bytes")
    knob, short = case.knobs.utilization, ""
    needed: float | None = None
    facts = ("available_bytes", "after_weights_bytes", "before_weights_bytes")
    if available is not None:
        short = f" ({_size(available)} left for it)"
        if total and limit is not None:
            needed = limit + (max(0.0, -available) + _GIB) / total
    elif before and after is not None:
        # SGLang keeps (1 - fraction) of what was free before the weights; the pool gets what is left after them.
        short = f" ({_size(before - after)} of {_size(before)} are weights)"
        needed = 1 - after / before + 0.02
    cause = f"after weights and workspace nothing is left for the KV cache under {knob}"
    cause += ("" if limit is None else f" {limit:g}") + short
    if case.host:
        cause = f"the KV cache cannot be made: {case.shortage}"
    if needed is not None and limit is not None and needed <= limit:
        # The figures are not all that counted.
        needed = None
    if needed is not None and needed <= _HIGHEST_UTILIZATION:
        step = f"set {knob} to {math.ceil(100 * needed) / 100:.2f}"
    elif needed is not None or (limit is not None and limit >= _HIGHEST_UTILIZATION):
        step = case.smaller_weights
    else:
        more = f" by at least {_size(-available)} of the card" if available is not None and available < 0 else ""
        step = f"raise {knob}{'' if limit is None else f' above {limit:g}'}{more}, {_HIGHEST_UTILIZATION} at most; if "
        step += "that does not do, take more cards or fewer bits"
    return _say(
        cause,
        step,
        f"{case.knobs.context} and {case.knobs.batch}: not even the smallest cache fits",
        "the model's files: they were read",
        _RESTART,
        facts=facts,
    )


def _llamacpp_cache(case: _Case, what: str) -> Advice:
    asked, context = case.number("asked_bytes"), case.whole("context_tokens")
    free, weights = case.number("free_at_start_bytes"), case.number("weights_bytes")
    cause = f"{what}: {case.shortage}" if free is None else f"{what}: it asks for {case.size('asked_bytes')}"
    if context is not None:
        cause += f" for a context of {context:,} tokens"
    step = "lower --ctx-size, or halve the cache with --cache-type-k q8_0 --cache-type-v q8_0"
    if context is not None:
        fits = context // 2
        if asked and free is not None and weights is not None and 0 < free - weights < asked:
            fits = int(context * 0.9 * (free - weights) / asked)
            cause += f"; after {_size(weights)} of weights {_size(free - weights)} were left"
        step = f"set --ctx-size to {max(256, fits // 256 * 256)} at most (or halve the cache with --cache-type-k q8_0 "
        step += "--cache-type-v q8_0)"
    return _say(
        cause,
        step,
        "the model's file: it was read",
        "--batch-size: it does not size the KV cache",
        _RESTART,
        facts=("context_tokens", "free_at_start_bytes", "weights_bytes"),
    )


def _kv_cache_below_request(case: _Case) -> Advice:
    if case.knobs.takes_what_is_asked:
        return _llamacpp_cache(case, "the KV cache of even one request does not fit")
    context, fits = case.whole("context_tokens"), case.whole("fits_tokens")
    needed, available = case.number("needed_bytes"), case.number("available_bytes")
    knob = case.knobs.context
    if fits is None and context and needed and available is not None:
        fits = max(0, int(context * available / needed)) // 16 * 16
    cause = "the KV cache holds less than one request of the configured length"
    if context is not None:
        cause = f"one request of {context:,} tokens needs " + (
            f"{_size(needed)} of KV cache" if needed is not None else "more KV cache than there is"
        )
        cause += f", and there are {_size(available)}" if available is not None else ""
        cause += f": room for {fits:,} tokens" if fits is not None else ""
    if fits and (context is None or fits < context):
        step = f"set {knob} to {fits} at most"
    else:
        step = f"lower {knob}, or raise {case.knobs.utilization}"
    return _say(
        cause,
        step,
        f"{case.knobs.batch}: one request alone does not fit",
        "the model's files: they were read",
        _RESTART,
        facts=("available_bytes",),
    )


def _kv_cache_exhausted(case: _Case) -> Advice:
    batch, context = case.whole("max_batch_size"), case.whole("context_tokens")
    knob = case.knobs.batch
    share = ""
    if case.knobs.takes_what_is_asked and batch and context:
        share = f": {batch} slots share {context:,} tokens"
    asked = case.whole("asked_tokens")
    step = f"lower {knob}" + (f" from {batch} to {max(1, batch // 2)}" if batch and batch > 1 else "")
    step += ", or give the cache more room" + (
        f" with {case.knobs.context}" if case.knobs.takes_what_is_asked else f" ({case.knobs.utilization})"
    )
    return _say(
        f"{case.after}the KV cache ran full while requests were running{share}"
        + (f"; {asked:,} tokens were asked for" if asked else ""),
        step,
        "quantisation of the weights: their memory is not what ran out",
        "restarting as it is: the same load fills it again",
        facts=("max_batch_size", "context_tokens"),
    )


# ---- warm-up and run time


def _warm_up(case: _Case) -> Advice:
    requests, prefill = case.whole("warm_up_requests"), case.whole("prefill_tokens")
    limit = case.number("utilization_ratio")
    if prefill is not None:
        cause = f"the warm-up with {prefill:,} prefill tokens found no memory" + (
            f": {case.shortage}" if "asked_bytes" in case.figures else ""
        )
        step = f"set {case.knobs.step} to {max(1, prefill // 2)}"
    elif requests is not None:
        cause = f"the warm-up with {requests:,} requests at once found no memory"
        step = f"set {case.knobs.batch} to {max(1, requests // 2)}"
    elif case.knobs.takes_what_is_asked:
        cause = f"the compute buffers do not fit: {case.shortage}"
        step = "lower --ubatch-size (512 by default) to 256; then --ctx-size"
    elif case.phase is Phase.PROFILE:
        # Before the cache is made: the memory limit does not matter yet, the size of the step that is tried does.
        tokens = case.whole("step_tokens")
        cause = f"the trial step before the KV cache is made does not fit beside the weights: {case.shortage}"
        step = f"lower {case.knobs.step}" + (
            f" from {tokens} to {tokens // 2}"
            if tokens
            else f" (it follows {case.knobs.context} where nothing else is set)"
        )
    else:
        cause = f"weights and cache leave too little for workspace and graphs: {case.shortage}"
        lower = "" if limit is None else f" from {limit:g} to {_lower(case, limit):.2f}"
        lower = lower or " by 0.05"
        step = f"lower {case.knobs.utilization}{lower}, so that the KV cache leaves room"
    return _say(
        cause,
        step,
        "the model's files and their quantisation: they were loaded",
        f"{case.knobs.context}: the workspace of a step follows from {case.knobs.step}, not from the longest request"
        if case.knobs.steps_size_workspace
        else "--n-gpu-layers to a higher value: the card is full",
        _RESTART,
    )


def _lower(case: _Case, limit: float) -> float:
    """The memory limit that leaves what was missing, and half as much again; 3 % of the card at least."""
    asked, free, total = (case.number(name) for name in ("asked_bytes", "free_bytes", "total_bytes"))
    missing = 0.03
    if asked is not None and total:
        missing = max(missing, 1.5 * (asked - (free or 0.0)) / total)
    return max(0.05, math.floor(100 * (limit - missing) + 1e-9) / 100)


def _runtime_out_of_memory(case: _Case) -> Advice:
    limit = case.number("utilization_ratio")
    knob = case.knobs.utilization
    if case.host:
        step = "give the machine or the container more memory, or load less into it"
    elif case.knobs.takes_what_is_asked:
        step = "lower --ubatch-size (512 by default) to 256, or --n-gpu-layers by a few"
    else:
        step = (
            f"lower {knob}"
            + (f" from {limit:g} to {_lower(case, limit):.2f}" if limit is not None else " by 0.05")
            + ": what one step needs is outside it"
        )
    return _say(
        f"{case.after}a step found no memory: {case.shortage}",
        step,
        f"{case.knobs.context} and the size of the KV cache by themselves: the cache was taken whole at the start",
        "restarting as it is: the same load brings it back",
        facts=("utilization_ratio",),
    )


# ---- the rest


def _request_refused(case: _Case) -> Advice:
    asked, context = case.whole("asked_tokens"), case.whole("context_tokens")
    leave = (
        "memory settings and quantisation: the server is up and refuses what it was sent",
        "restarting: the same requests are refused again",
    )
    if case.sign.kind == "too long":
        cause = "requests are longer than the server's context"
        if asked is not None and context is not None:
            cause = f"a request of {asked:,} tokens was sent to a server with a context of {context:,}"
        limit = f" below {context:,} tokens" if context is not None else ""
        return _say(
            cause,
            f"keep prompt and max_tokens together{limit} at the client, or start the server with a longer "
            + case.knobs.context,
            *leave,
        )
    if case.sign.kind == "time-out":
        return _say(
            "requests ran into a time limit",
            "raise the client's or proxy's time limit above the longest answer, or send fewer requests at once",
            *leave,
        )
    return _say(
        "the server does not accept the requests that it was sent",
        "correct the field that the line names (`plimsoll smoke` sends a request that is right)",
        *leave,
    )


def _communication(case: _Case) -> Advice:
    operation, limit = case.figures.get("operation"), case.whole("timeout_ms")
    what = case.figures.get("what")
    if operation is not None and limit is not None:
        cause = f"{case.after}the cards waited {limit // 1000:,} s for one another in {operation}"
        step = "find the rank that did not come (its last line, `py-spy dump`, GPU use 0 %): it hangs or died, the "
        step += "others only wait"
    else:
        cause = f"{case.after}the processes of the server could not talk to one another" + (
            f" ({what})" if what else ""
        )
        step = "run once with NCCL_DEBUG=INFO: its last WARN line names the interface, shared memory or link that fails"
    return _say(cause, step, "memory limit, context length and batch size: they do not touch communication")


def _hang(case: _Case) -> Advice:
    limit = case.whole("timeout_seconds")
    return _say(
        f"{case.after}the engine made no progress"
        + (f" for {limit:,} s" if limit is not None else "")
        + ", and its watchdog ended it",
        "take `py-spy dump` of the workers and `nvidia-smi` while it hangs next time: a card at 100 % is a kernel, one "
        "at 0 % a lost rank",
        "raising the watchdog's limit: it only hides the hang for longer",
    )


def _killed(case: _Case) -> Advice:
    program, resident, signal = case.figures.get("program"), case.size("resident_bytes"), case.figures.get("signal")
    leave = ("GPU memory settings: the limit that struck is not the card's",)
    if case.sign.kind in ("oom_killer", "container"):
        scope = (
            "the container's memory limit"
            if case.sign.kind == "container" or "cgroup" in str(case.figures.get("scope", ""))
            else "the machine's memory"
        )
        cause = f"the kernel killed {program or 'the server'} because {scope} was used up" + (
            f" ({resident} of its own)" if resident else ""
        )
        step = f"raise {'the container’s memory limit' if 'container' in scope else 'the memory of the machine'}" + (
            f" well above {resident}" if resident else " above what loading the weights needs"
        )
        return _say(cause, step, *leave)
    if signal == "SIGTERM":
        return _say(
            f"{case.after}a process was ended by SIGTERM: somebody, or an orchestrator, asked it to stop",
            "look at what supervises it (events of the pod, the unit's journal) at that time",
            *leave,
        )
    cause = f"{case.after}a process was ended from outside" + (f" by {signal}" if signal else ", without a word")
    return _say(
        cause,
        "look for 'Killed process' in `dmesg` and for OOMKilled in the container's state at that time: a memory limit "
        "is what sends signal 9 most often",
        *leave,
    )


def _crashed(case: _Case) -> Advice:
    signal, what = case.figures.get("signal"), case.figures.get("what")
    cause = f"{case.after}a process crashed" + (
        f" ({signal})" if signal else f" on its own check ({what})" if what else ""
    )
    step = "update the engine; if it comes again, report it with the lines before it"
    if signal == "SIGILL":
        step = "take a build of the engine that was made for this processor: it met an instruction unknown to this one"
    return _say(cause, step, "memory settings: nothing in the log says that memory ran out")


_XID = {
    13: ("a kernel on the card failed", False), 31: ("a kernel on the card touched memory that is not its own", False),
    43: ("the card stopped working for one process", False),
    45: ("the card's work was cut off, after an earlier error", False),
    48: ("the card's memory has an error that could not be corrected", True),
    63: ("a page of the card's memory was retired", True),
    64: ("a page of the card's memory could not be retired", True), 74: ("NVLink failed", True),
    79: ("the card fell off the bus", True), 92: ("the card's memory has many corrected errors", True),
    94: ("the card's memory has an error, contained to one process", True),
    95: ("the card's memory has an error, not contained", True),
    119: ("the card's own processor did not answer", True), 120: ("the card's own processor failed", True),
}  # fmt: skip
"""What NVIDIA's "XID Errors" says of each, and whether it points at the hardware."""


def _driver(case: _Case) -> Advice:
    leave = ("memory limit, batch size and context length: the card did not get to work",)
    if case.sign.kind == "xid":
        number = case.whole("xid") or 0
        meaning, hardware = _XID.get(number, ("the driver reported an error of the card", True))
        step = (
            "take the machine out of service and have the card checked"
            if hardware
            else "update the engine and the driver; the program's own log at that time names the kernel"
        )
        return _say(
            f"{case.after}Xid {number}: {meaning}",
            step,
            "memory limit, batch size and context length: they do not cause this",
        )
    if case.sign.kind == "old":
        version = case.whole("driver_cuda")
        known = f" (it supports CUDA {version // 1000}.{version % 1000 // 10})" if version else ""
        return _say(
            f"the NVIDIA driver is older than the CUDA that this build needs{known}",
            "update the driver on the host, or install a build made for the CUDA that `nvidia-smi` shows",
            *leave,
        )
    if case.sign.kind == "none":
        return _say(
            "the engine sees no card",
            "check that `nvidia-smi` works where the server runs; for a container: --gpus all and NVIDIA's container "
            "toolkit",
            *leave,
        )
    if case.sign.kind == "library":
        what = case.figures.get("library") or case.figures.get("symbol") or "a library"
        return _say(
            f"{what} is missing, or of another version than this build was linked with",
            "reinstall the engine with its own dependencies in a clean environment (or use its container image)",
            *leave,
        )
    return _say(
        f"{case.after}driver, CUDA library or card failed",
        "look in the kernel's log for Xid lines at that time",
        *(leave if case.answered is None else ("memory limit and batch size: they do not cause this",)),
    )


def _model_unsupported(case: _Case) -> Advice:
    leave = "batch size, context length and memory limit: the model was not built"
    if case.sign.kind == "custom_code":
        return _say("", "", leave, _RESTART)
    return _say(
        "this release cannot run this model",
        "update the engine",
        leave,
        "the weights' files: they are not what is wrong",
    )


def _settings(case: _Case) -> Advice:
    heads, split = case.whole("heads"), case.whole("tensor_parallel_size")
    what = case.figures.get("what")
    cause = f"the engine refuses a setting: {what}" if what else "the engine refuses a setting"
    step = "correct the setting that the line names"
    if heads and split:
        fits = max(size for size in range(1, split + 1) if heads % size == 0)
        cause = f"{heads} attention heads cannot be split over {split} cards"
        step = f"set {case.knobs.split} to {fits}"
    return _say(cause, step, "the model's files and quantisation: nothing was loaded", _RESTART)


def _port_in_use(case: _Case) -> Advice:
    port = case.whole("port")
    name = f"port {port}" if port else "the port"
    return _say(
        f"{name} is taken by another process",
        f"stop the process that listens there (`ss -ltnp{f' sport = :{port}' if port else ''}` names it: often the "
        "last start of this server), or choose another port",
        "memory limit, batch size and context length",
    )


def _access_denied(case: _Case) -> Advice:
    path = case.figures.get("path")
    return _say(
        f"the server may not open {path or 'a file'}",
        f"let the server's user read {path or 'it'} (owner, mode, and the mount's options)",
        "memory limit, batch size and context length: no memory was asked for yet",
        "running the server as root: it hides the wrong owner",
    )


def _disk_full(case: _Case) -> Advice:
    path = case.figures.get("path")
    return _say(
        "a disk is full" + (f" ({path})" if path else ""),
        "free room on the file system that `df -h` shows full (model cache, /tmp, logs)",
        "memory limit, batch size and context length",
    )


def _shared_memory(_: _Case) -> Advice:
    return _say(
        "shared memory between the processes ran out (SIGBUS): the container's /dev/shm is too small",
        "start the container with --ipc=host, or --shm-size=16g",
        "GPU memory settings: /dev/shm is main memory",
    )


def _limits(_: _Case) -> Advice:
    return _say(
        "the process may open no more files",
        "raise the limit of open files: ulimit -n 65536, or LimitNOFILE= in the unit",
        "memory limit, batch size and context length",
    )


_WRITERS: Mapping[Failure, tuple[str, Callable[[_Case], Advice]]] = {
    Failure.WEIGHTS_UNREADABLE: ("the weights cannot be read", _weights_unreadable),
    Failure.WEIGHTS_OUT_OF_MEMORY: ("out of memory while loading the weights", _weights_out_of_memory),
    Failure.MEMORY_TAKEN: ("the card's memory is taken", _memory_taken),
    Failure.KV_CACHE_UNALLOCATED: ("no memory for the KV cache", _kv_cache_unallocated),
    Failure.KV_CACHE_BELOW_REQUEST: ("the KV cache is smaller than one request", _kv_cache_below_request),
    Failure.WARM_UP: ("out of memory at warm-up", _warm_up),
    Failure.RUNTIME_OUT_OF_MEMORY: ("out of memory while serving", _runtime_out_of_memory),
    Failure.KV_CACHE_EXHAUSTED: ("the KV cache ran full while serving", _kv_cache_exhausted),
    Failure.REQUEST_REFUSED: ("requests are refused", _request_refused),
    Failure.COMMUNICATION: ("communication between the cards failed", _communication),
    Failure.HANG: ("the engine hung", _hang),
    Failure.KILLED: ("killed from outside", _killed),
    Failure.CRASHED: ("a process crashed", _crashed),
    Failure.DRIVER: ("driver, library or card", _driver),
    Failure.MODEL_UNSUPPORTED: ("the model is not supported", _model_unsupported),
    Failure.SETTINGS: ("a setting is refused", _settings),
    Failure.PORT_IN_USE: ("the port is in use", _port_in_use),
    Failure.ACCESS_DENIED: ("access denied", _access_denied),
    Failure.DISK_FULL: ("disk full", _disk_full),
    Failure.SHARED_MEMORY: ("shared memory ran out", _shared_memory),
    Failure.LIMITS: ("too many open files", _limits),
}
