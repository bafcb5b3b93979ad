"""What failures look like in logs: one table for all engines, kernels and containers.

A row is a sign: words that a line must have (`needles`, found fast), a pattern, and what the line means. Patterns must
not depend on *which* digits a line has, because the reader takes lines that differ only in numbers for one line; a
number that matters is a named group, and the reader judges it. What an engine's own table of complaints
(`serving.engines`) knows is taken from there and not repeated here: a row exists where a line means something finer
than the complaint, or where no engine complains at all.

Sources: the engines' sources and release notes (vLLM 0.2 to 0.32, SGLang 0.1 to 0.5, llama.cpp b3184 to b11434, TGI 0.8
to 3), PyTorch's and NCCL's error strings, the kernel's `mm/oom_kill.c`, NVIDIA's "XID Errors", Docker's exit codes; each
is met by at least one log under tests/samples.
"""

# ruff: noqa: E501
# A pattern is read, searched and compared whole.

import re
from dataclasses import dataclass
from enum import Enum

from serving.diagnosis.words import Failure, Phase
from serving.engines import ENGINES, Complaint

__all__ = ["FACTS", "FIGURES", "SIGNS", "Role", "Sign"]


class Role(Enum):
    """What a sign says of the server."""

    START = "start"
    READY = "ready"
    STOP = "stop"
    """It was asked to stop."""
    PHASE = "phase"
    FRAME = "frame"
    """A frame of a traceback that tells what was being done."""
    TRACEBACK = "traceback"
    NOTE = "note"
    """Looks like a failure and is none, or only helps to judge one."""
    ROOT = "root"
    """Names a cause."""
    MEMORY = "memory"
    """Device or host memory ran out; the class depends on what was being done."""
    POOL = "pool"
    """The KV cache has no room; before readiness it could not be made, after it it ran full."""
    PEER = "peer"
    """Communication failed or stood still: a cause only where no process had one of its own."""
    LOSS = "loss"
    """A process is gone, by exit code or signal: a cause only where nothing else says why."""
    AFTERMATH = "aftermath"
    """What follows from a cause, and never is one."""
    REQUEST = "request"
    """One request was refused."""


@dataclass(frozen=True, slots=True)
class Sign:
    """One row of the table.

    Attributes:
        role: what it says.
        needles: words, one of which a line must have near its beginning.
        pattern: what the line must match; named groups are figures.
        failure: the class it names.
        engine: whose words they are; "" where several say so.
        phase: for phases and frames.
        cause: the sentence about it; {figures} are filled in. "" leaves it to the class.
        next_step: the same for what to do.
        kind: for refused requests, what was wrong; for roots, a finer word than the class.
        alone: nothing else is read from a line that has it.
    """

    role: Role
    needles: tuple[bytes, ...]
    pattern: re.Pattern[str]
    failure: Failure | None = None
    engine: str = ""
    phase: Phase | None = None
    cause: str = ""
    next_step: str = ""
    kind: str = ""
    alone: bool = False


def _needles(words: str) -> tuple[bytes, ...]:
    return tuple(word.encode() for word in words.split("|"))


def _sign(role: Role, needles: str, pattern: str, **more: object) -> Sign:
    return Sign(role, _needles(needles), re.compile(pattern), **more)  # type: ignore[arg-type] # each by its name


def _start(engine: str, needles: str, pattern: str, kind: str = "") -> Sign:
    return _sign(Role.START, needles, pattern, engine=engine, kind=kind)


def _phase(phase: Phase, needles: str, pattern: str, engine: str = "") -> Sign:
    return _sign(Role.PHASE, needles, pattern, phase=phase, engine=engine)


def _frame(phase: Phase, needles: str, pattern: str) -> Sign:
    return _sign(Role.FRAME, needles, pattern, phase=phase)


def _root(failure: Failure, needles: str, pattern: str, **more: object) -> Sign:
    return _sign(Role.ROOT, needles, pattern, failure=failure, **more)


def _aftermath(needles: str, pattern: str, engine: str = "") -> Sign:
    return _sign(Role.AFTERMATH, needles, pattern, engine=engine)


_WEIGHT_FILE = r"[^\s'\"`]+\.(?:safetensors|gguf|bin|pt|pth|index\.json)\b"

_LIFE: tuple[Sign, ...] = (
    _start("vllm", "vLLM API server version|non-default args:", r"vLLM API server version|non-default args:"),
    _start("vllm", "Initializing a", r"Initializing an? (?:V\d )?LLM engine", "again"),
    _start("sglang", "server_args=", r"\bserver_args="),
    _start("llamacpp", "loading model", r"(?:load_model|main): loading model\b"),
    _start("llamacpp", "loaded meta data with", r"llama_model_loader: loaded meta data with", "again"),
    _start("tgi", "Args {", r"(?:^|: )Args \{"),
    _sign(Role.READY, "Application startup complete", r"Application startup complete"),
    _sign(Role.READY, "fired up and ready", r"server is fired up and ready", engine="sglang"),
    _sign(
        Role.READY,
        "listening on http|all slots are idle|model loaded",
        r"listening on http|all slots are idle|: model loaded\b",
        engine="llamacpp",
    ),
    _sign(Role.READY, "Connected", r"(?:^|text_generation_router\S*: \S+: )Connected$", engine="tgi"),
    _sign(
        Role.STOP,
        "shutdown triggered|received signal|Shutting down",
        r"\[shutdown\] API server: shutdown triggered|trigger received signal=SIG(?:TERM|INT)|^(?:INFO:)?\s*Shutting down$",
    ),
    _sign(
        Role.STOP,
        "SIGTERM|SIGINT|signal",
        r"(?i)\breceived (?:signal )?SIG(?:TERM|INT)\b|\b(?:got|caught) (?:signal )?SIG(?:TERM|INT)\b|SIGTERM received",
    ),
    _sign(
        Role.STOP,
        "KeyboardInterrupt|cleaning up before exit|Gracefully exiting",
        r"\bKeyboardInterrupt\b|cleaning up before exit|Gracefully exiting",
    ),
    _sign(Role.TRACEBACK, "Traceback (most", r"Traceback \(most recent call last\)"),
)

_PHASES: tuple[Sign, ...] = (
    _phase(
        Phase.WEIGHTS,
        "Starting to load model|Load weight begin|checkpoint shards|loading model tensors",
        r"Starting to load model|Load weight begin|Loading \w+ checkpoint shards|loading model tensors",
    ),
    _phase(Phase.WEIGHTS, "Starting shard|Download", r"(?:^|: )Starting shard", "tgi"),
    _phase(
        Phase.PROFILE,
        "oading|Load weight end|Loading model weights",
        r"Model loading took|Loading model weights took|Load weight end",
    ),
    _phase(Phase.PROFILE, "Warming up model", r"Warming up model", "tgi"),
    _phase(
        Phase.KV_CACHE,
        "KV cache|KV Cache|blocks:|constructing",
        r"Available KV cache memory|# (?:GPU|cuda) blocks|KV Cache is allocated|llama_context: constructing|llama_new_context_with_model: n_ctx",
    ),
    _phase(
        Phase.GRAPHS,
        "KV cache size|Memory pool end|cuda graph|CUDA graph|apturing|KV buffer size|KV self size",
        r"KV cache size: |Memory pool end|(?i:capture \w* ?cuda graph begin)|Capturing (?:the model for )?CUDA graph|KV buffer size =|KV self size",
    ),
    _frame(
        Phase.WEIGHTS,
        "in load_model|in create_weights|in load_weights|in _initialize_model|in get_model",
        r"\bin (?:load_model|create_weights|load_weights|_initialize_model|get_model)\b",
    ),
    _frame(
        Phase.PROFILE,
        "in profile_run|in determine_|in warmup|in profile",
        r"\bin (?:profile_run|determine_available_memory|determine_num_available_blocks|warmup)\b",
    ),
    _frame(
        Phase.KV_CACHE,
        "kv_cache|memory_pool|cache_engine|init_cache",
        r"\bin (?:initialize_kv_cache\w*|_allocate_kv_cache\w*|init_memory_pool|initialize_cache|_init_cache_engine|init_kv_cache\w*|initialize_from_config)\b",
    ),
    _frame(
        Phase.GRAPHS,
        "capture_model|init_cuda_graphs|compile_or_warm|in capture",
        r"\bin (?:capture_model|init_cuda_graphs|init_device_graphs|compile_or_warm_up_model|capture)\b",
    ),
    _frame(
        Phase.SERVING,
        "run_busy_loop|run_engine_loop|event_loop|in prefill|in decode|execute_model",
        r"\bin (?:run_busy_loop|run_engine_loop|event_loop_\w+|Prefill|Decode|engine_step)\b|\bengine_core\.run_busy_loop\(\)",
    ),
)

_NOTES: tuple[Sign, ...] = (
    # Read first: each looks like a failure to a row below.
    _sign(
        Role.NOTE,
        "retracted_reqs|Retract requests",
        r"#retracted_reqs|Retract requests",
        alone=True,
        engine="sglang",
        kind="retracted",
    ),
    _sign(
        Role.NOTE,
        "retrying with|retrying without|memory slot",
        r"retrying with smaller batch|retrying without pipeline|failed to find a memory slot",
        alone=True,
        engine="llamacpp",
    ),
    _sign(
        Role.NOTE,
        "fit params",
        r"(?:failed|unable) to fit (?:params|model)\b.*by reducing context",
        alone=True,
        engine="llamacpp",
        kind="cannot_fit",
    ),
    _sign(Role.NOTE, "fit params|params_fit", r"(?:fit_params|params_fit): ", alone=True, engine="llamacpp"),
    _sign(Role.NOTE, "destroy_process_group", r"destroy_process_group\(\) was not called", alone=True),
    _sign(
        Role.NOTE,
        "resource_tracker|leaked",
        r"resource_tracker: There appear|\bleaked (?:function|type|instance|semaphore|shared)",
        alone=True,
    ),
    _sign(Role.NOTE, "ulimit", r"Found ulimit of .*failed to automatically increase", alone=True),
    _sign(Role.NOTE, "shared memory broadcast", r"No available shared memory broadcast block found", alone=True),
    _sign(
        Role.NOTE,
        "memory pinning|expandable_segments|PYTORCH_CUDA_ALLOC",
        r"^If reserved but unallocated memory is large",
        alone=True,
    ),
    _sign(
        Role.NOTE,
        "wait_for_shutdown|force killing|sigterm",
        r"\[shutdown\] (?:Process manager|Executor|MPClient)|\[shutdown\] force killing",
        alone=True,
    ),
    _sign(Role.NOTE, "Killing local vLLM worker", r"Killing local vLLM worker processes", alone=True),
)

_FILES: tuple[Sign, ...] = (
    _root(
        Failure.WEIGHTS_UNREADABLE,
        "Quantization method",
        r"(?i)Quantization method specified in the model config \((?P<config_quantization>[\w.-]+)\) does not match the quantization method specified in the [`']?quantization[`']? argument \((?P<asked_quantization>[\w.-]+)\)",
        kind="quantisation",
        cause="the weights are quantised as {config_quantization}, and the command line asks for {asked_quantization}",
        next_step="remove --quantization {asked_quantization}: the weights say themselves how they are quantised",
    ),
    _root(
        Failure.WEIGHTS_UNREADABLE,
        "config file for",
        r"Cannot find the config file for (?P<asked_quantization>\w+)",
        kind="quantisation",
        cause="{asked_quantization} was asked for, and these weights were not quantised with it",
        next_step="remove --quantization {asked_quantization}, or point the server at weights that were quantised with it",
    ),
    _root(
        Failure.WEIGHTS_UNREADABLE,
        "uantization",
        r"(?i)unknown quantization method:? [`'\"]?(?P<asked_quantization>[\w.-]+)",
        kind="quantisation",
        cause="the quantisation {asked_quantization} is not known to this release",
    ),
    _root(
        Failure.WEIGHTS_UNREADABLE,
        "any model weights",
        r"Cannot find any model weights with [`'\"]?(?P<path>[^`'\"\s]+)",
        kind="missing",
        cause="there are no weights at {path}",
    ),
    _root(
        Failure.WEIGHTS_UNREADABLE,
        "No such file or",
        rf"(?:FileNotFoundError|No such file or directory|failed to open GGUF file).*?(?P<path>{_WEIGHT_FILE})",
        kind="missing",
        cause="{path} is not there",
    ),
    _root(
        Failure.WEIGHTS_UNREADABLE,
        "No such file or|to open GGUF|failed to open",
        r"failed to open (?:GGUF file )?'?(?P<path>[^'\s]+)'?.*No such file",
        kind="missing",
        engine="llamacpp",
        cause="{path} is not there",
    ),
    _root(
        Failure.WEIGHTS_UNREADABLE,
        "not a local folder|not appear to have a file|load the configuration|Repository Not Found|valid repository",
        r"(?P<path>\S+) is not a local folder and is not a valid model identifier|(?P<path2>\S+) does not appear to have a file named|Can't load the configuration of '(?P<path3>[^']+)'|Repository Not Found for url: \S*?/(?P<path4>[\w.-]+/[\w.-]+)/resolve",
        kind="missing",
        cause="there is no model at {path}",
    ),
    _root(
        Failure.WEIGHTS_UNREADABLE,
        "Invalid repository ID|Unrecognized model in",
        r"Invalid repository ID or local directory specified: '(?P<path>[^']+)'|Unrecognized model in (?P<path2>\S+?)\. Should have a `model_type`",
        kind="missing",
        cause="{path} holds no model that can be recognised: no config.json, or one that names no model type",
        next_step="check that {path}, as the server sees it (inside the container: the mount), is the model's own folder with its config.json",
    ),
    _root(
        Failure.WEIGHTS_UNREADABLE,
        "Too Many Requests|HfHubHTTPError",
        r"(?:Client|Server) Error: (?P<what>Too Many Requests|Service Unavailable|Bad Gateway|Gateway Time-?out|Internal Server Error) for url: \S*huggingface",
        kind="offline",
        cause="the hub refused to give the model's files ({what})",
        next_step="download the model to this machine once and give its folder as the model's path",
    ),
    _root(
        Failure.WEIGHTS_UNREADABLE,
        "outgoing traffic|couldn't connect to|LocalEntryNotFound",
        r"outgoing traffic has been disabled|[Cc]ouldn't connect to 'https://huggingface\.co|LocalEntryNotFoundError",
        kind="offline",
        cause="the model is not on this machine, and the hub cannot be reached from it",
        next_step="download the model to this machine and give its folder as the model's path",
    ),
    _root(
        Failure.WEIGHTS_UNREADABLE,
        "deserializing header|SafetensorError",
        r"SafetensorError\b.*?: (?P<what>.+)|Error while deserializing header: (?P<what2>.+)",
        kind="broken",
        cause="a shard is cut short or broken: {what}",
    ),
    _root(
        Failure.WEIGHTS_UNREADABLE,
        "PytorchStreamReader|invalid load key",
        r"PytorchStreamReader failed|invalid load key",
        kind="broken",
        cause="a shard is cut short or broken",
    ),
    _root(
        Failure.WEIGHTS_UNREADABLE,
        "within the file bounds",
        r"tensor '(?P<tensor>[^']+)' data is not within the file bounds",
        kind="broken",
        engine="llamacpp",
        cause="the file ends before tensor {tensor}: it is cut short",
    ),
    _root(
        Failure.WEIGHTS_UNREADABLE,
        "invalid magic|read magic|bad magic|unsupported file",
        r"invalid magic (?:characters|number)|failed to read magic|bad magic",
        kind="format",
        engine="llamacpp",
        cause="the file is not a GGUF file",
    ),
    _root(
        Failure.WEIGHTS_UNREADABLE,
        "number of tensors|missing tensor|wrong shape|split file",
        r"wrong number of tensors; expected (?P<expected_tensors>\d+), got (?P<found_tensors>\d+)|missing tensor '(?P<tensor>[^']+)'|tensor '(?P<tensor2>[^']+)' has wrong shape|(?:illegal|invalid) split (?:file|count|idx)",
        kind="mismatch",
        engine="llamacpp",
    ),
    _root(
        Failure.WEIGHTS_UNREADABLE,
        "KeyError",
        r"KeyError: ['\"](?P<tensor>[\w.]+\.(?:weight|qweight|qzeros|scales|bias|weight_scale\w*|input_scale|lora_\w))['\"]",
        kind="mismatch",
        cause="the model that was built has no place for tensor {tensor}: format or quantisation of the weights is not what the configuration says",
    ),
    _root(
        Failure.WEIGHTS_UNREADABLE,
        "no module or parameter named|size mismatch for|not initialized from|load weight|does not exist",
        r"\bweight (?P<tensor3>[\w.]+) does not exist|There is no module or parameter named '(?P<tensor>[^']+)'|size mismatch for (?P<tensor2>[\w.]+)|[Ff]ollowing weights were not initialized from checkpoint|(?:Attempted|Tried) to load weight",
        kind="mismatch",
    ),
    _root(
        Failure.MODEL_UNSUPPORTED,
        "odel architectures",
        r"Model architectures \[(?P<architecture>[^\]]*)\] (?:are not supported|failed to be inspected)",
        cause="this release does not know the architecture {architecture}",
        next_step="update the engine to a release that lists {architecture}",
    ),
    _root(
        Failure.MODEL_UNSUPPORTED,
        "unknown model architecture",
        r"unknown model architecture: '(?P<architecture>[^']*)'",
        engine="llamacpp",
        cause="this build of llama.cpp does not know the architecture '{architecture}'",
        next_step="update llama.cpp to a build that supports '{architecture}', or check that the file is a language model",
    ),
    _root(
        Failure.MODEL_UNSUPPORTED,
        "recognize this architecture",
        r"model type [`'](?P<architecture>[\w.-]+)[`'] but Transformers does not recognize",
        cause="the installed transformers does not know the model type {architecture}",
        next_step="update transformers (and the engine with it) to a release that knows {architecture}",
    ),
    _root(
        Failure.MODEL_UNSUPPORTED,
        "Unsupported model type",
        r"Unsupported model type (?P<architecture>\S+)",
        cause="this release does not know the model type {architecture}",
        next_step="update the engine to a release that lists {architecture}",
    ),
    _root(
        Failure.MODEL_UNSUPPORTED,
        "trust_remote_code|custom code",
        r"(?:set the option|pass the argument) [`'\"]?trust_remote_code=True|contains custom code which must be executed|requires you to execute the configuration file",
        kind="custom_code",
        cause="the model's folder brings its own Python code, and the engine was not allowed to run it",
        next_step="read that code, then start the server with --trust-remote-code",
    ),
    _root(
        Failure.MODEL_UNSUPPORTED,
        "only supported on",
        r"(?P<dtype>[Bb]float\d+) is only supported on \w+ with compute capability of at least (?P<wanted_capability>[\d.]*\d).*?Your (?P<card>.+?) (?:GPU |XPU )?has compute capability (?P<capability>[\d.]*\d)",
        kind="card",
        cause="{dtype} needs compute capability {wanted_capability}, and {card} has {capability}",
        next_step="start the server with --dtype half",
    ),
    _root(
        Failure.MODEL_UNSUPPORTED,
        "not supported for the current",
        r"quantization method (?P<asked_quantization>[\w.-]+) is not supported for the current GPU\. Minimum capability: (?P<wanted_capability>\d+)\. Current capability: (?P<capability>\d+)",
        kind="card",
        cause="the quantisation {asked_quantization} needs compute capability {wanted_capability} (tenths), and this card has {capability}",
        next_step="take weights in a quantisation that this card can compute, or another card",
    ),
    _root(
        Failure.MODEL_UNSUPPORTED,
        "compute capability below",
        r"GPUs with compute capability below (?P<wanted_capability>[\d.]*\d) are not supported",
        kind="card",
        cause="this card's compute capability is below {wanted_capability}, the least that the engine supports",
        next_step="take a newer card, or an engine that supports this one (llama.cpp)",
    ),
    _root(
        Failure.MODEL_UNSUPPORTED,
        "only supports Ampere",
        r"FlashAttention only supports (?P<wanted_card>\w+) GPUs or newer",
        kind="card",
        cause="the chosen attention kernels need a card of the generation {wanted_card} or newer",
        next_step="choose another attention backend (vLLM: VLLM_ATTENTION_BACKEND or --attention-backend; SGLang: --attention-backend)",
    ),
    _root(
        Failure.MODEL_UNSUPPORTED,
        "head_dim|head size",
        r"(?i)unsupported head[_ ](?:dim|size):? (?P<head_size>\d+)|head size (?P<head_size2>\d+) is not supported",
        kind="card",
        cause="the chosen attention kernels were not made for heads of {head_size}",
        next_step="choose another attention backend (vLLM: VLLM_ATTENTION_BACKEND or --attention-backend; SGLang: --attention-backend)",
    ),
)

_MEMORY: tuple[Sign, ...] = (
    _root(
        Failure.MEMORY_TAKEN,
        "on startup is less than",
        r"Free memory on device .*on startup is less than desired GPU memory utilization",
        engine="vllm",
    ),
    _root(
        Failure.MEMORY_TAKEN,
        "in memory profiling",
        r"Error in memory profiling\. Initial free memory (?P<free_bytes>[\d.]+ \w+), current free memory (?P<later_free_bytes>[\d.]+ \w+)",
        engine="vllm",
        kind="race",
        cause="memory of the card was freed by another process while vLLM measured it ({free_bytes} free before, {later_free_bytes} after)",
        next_step="start the servers that share this card one after the other",
    ),
    _root(
        Failure.WEIGHTS_OUT_OF_MEMORY,
        "Failed to load model",
        r"Failed to load model - not enough GPU memory",
        engine="vllm",
    ),
    _root(
        Failure.WEIGHTS_OUT_OF_MEMORY,
        "unable to allocate",
        r"error loading model: unable to allocate (?P<backend>\S+) buffer",
        engine="llamacpp",
    ),
    _root(Failure.KV_CACHE_UNALLOCATED, "for kv cache", r"failed to allocate buffer for kv cache", engine="llamacpp"),
    _root(
        Failure.WARM_UP,
        "compute buffers|compute pp buffers|compute tg buffers",
        r"failed to allocate compute (?:pp |tg )?buffers",
        engine="llamacpp",
    ),
    _root(
        Failure.KV_CACHE_UNALLOCATED,
        "Not enough memory. Please try",
        r"Not enough memory\. Please try to increase --mem-fraction-static",
        engine="sglang",
    ),
    _root(Failure.KV_CACHE_BELOW_REQUEST, "Memory pool size is", r"Memory pool size is too small", engine="sglang"),
    _root(
        Failure.WARM_UP,
        "warming up sampler",
        r"out of memory occurred when warming up (?:sampler|pooler) with (?P<warm_up_requests>\d+) dummy requests",
        engine="vllm",
    ),
    _root(Failure.WARM_UP, "graph failed", r"(?i)capture \w* ?cuda graph failed: .*out of memory", engine="sglang"),
    _root(
        Failure.WARM_UP,
        "Not enough memory to handle",
        r"Not enough memory to handle (?P<prefill_tokens>\d+) (?:prefill|total) tokens|Not enough memory to handle `?max_total_tokens",
        engine="tgi",
    ),
    _root(
        Failure.SETTINGS,
        "available Mamba cache blocks",
        r"max_num_seqs \((?P<max_batch_size>\d+)\) exceeds available Mamba cache blocks \((?P<fits_requests>\d+)\)",
        engine="vllm",
        cause="max_num_seqs is {max_batch_size}, and the state cache holds {fits_requests} requests",
        next_step="set max_num_seqs to {fits_requests} at most",
    ),
    _root(
        Failure.KV_CACHE_EXHAUSTED,
        "alloc_req_slots|out of memory. Try to lower",
        r"alloc_req_slots runs out of memory|(?:Prefill|Decode) out of memory\. Try to lower",
        engine="sglang",
    ),
    _root(
        Failure.KV_CACHE_EXHAUSTED,
        "KV cache is full",
        r"failed to decode the batch: KV cache is full",
        engine="llamacpp",
    ),
    _sign(
        Role.MEMORY,
        "CUBLAS_STATUS_ALLOC_FAILED|out of memory",
        r"CUBLAS_STATUS_ALLOC_FAILED|Cuda failure (?:\d+ )?'out of memory'",
    ),
    _sign(
        Role.MEMORY,
        "exceed allowed memory|Device memory allocation|OutOfDeviceMemory|Insufficient Memory|OUT_OF_DEVICE_MEMORY",
        r"would exceed allowed memory|Device memory allocation of size \d+ failed|ErrorOutOfDeviceMemory|Insufficient Memory \(|_ERROR_OUT_OF_DEVICE_MEMORY",
    ),
    _sign(
        Role.MEMORY,
        "insufficient memory|allocate memory|bad_alloc|MemoryError|Cannot allocate|to allocate buffer of size",
        r"ggml_aligned_malloc: insufficient memory|DefaultCPUAllocator: (?:can't|not enough)|std::bad_alloc|\bMemoryError\b|Cannot allocate memory|cpu_buffer_type_alloc_buffer: failed to allocate buffer of size",
        kind="host",
    ),
)

_DRIVER: tuple[Sign, ...] = (
    _root(
        Failure.DRIVER,
        "NVIDIA driver on your system is too old|driver version is insufficient|InsufficientDriver",
        r"driver on your system is too old(?: \(found version (?P<driver_cuda>\d+)\))?|CUDA driver version is insufficient|cudaErrorInsufficientDriver",
        kind="old",
    ),
    _root(
        Failure.DRIVER,
        "no NVIDIA driver|infer device type|No CUDA GPUs|CUDA-capable device|to initialize CUDA",
        r"Found no NVIDIA driver|Failed to infer device type|No CUDA GPUs are available|no CUDA-capable device is detected|failed to initialize CUDA",
        kind="none",
    ),
    _root(
        Failure.DRIVER,
        "select device driver",
        r"could not select device driver .*\[\[gpu\]\]",
        kind="none",
    ),
    _root(
        Failure.DRIVER,
        "not compiled with CUDA",
        r"Torch not compiled with CUDA enabled",
        kind="build",
        cause="the installed PyTorch was built without CUDA",
        next_step="reinstall the engine with its own dependencies in a clean environment (or use its container image)",
    ),
    _root(
        Failure.DRIVER,
        "requirement error",
        r"nvidia-container-cli: requirement error: unsatisfied condition: (?P<what>[^,]+),",
        kind="old",
        cause="the NVIDIA driver of this machine is older than the container asks for ({what})",
    ),
    _root(
        Failure.DRIVER,
        "library version mismatch",
        r"Driver/library version mismatch",
        kind="mismatch",
        cause="the NVIDIA driver's kernel module and its libraries are of different versions, as after an update without a restart",
        next_step="restart the machine (or unload and load the driver's kernel modules)",
    ),
    _root(
        Failure.DRIVER,
        "system not yet initialized",
        r"system not yet initialized",
        kind="fabric",
        cause="the cards' NVSwitch fabric is not up",
        next_step="start the fabric manager of the driver's own version on the host (`systemctl status nvidia-fabricmanager`)",
    ),
    _root(
        Failure.DRIVER,
        "CUDA error: ",
        r"CUDA error: (?P<what>operation not supported|unknown error|all CUDA-capable devices are busy or unavailable|initialization error|invalid resource handle|driver shutting down)",
        kind="cuda",
        cause="the driver refused what the engine asked of the card ({what})",
        next_step="run `nvidia-smi` and a small CUDA program where the server runs: a virtual or shared card, its compute mode or its driver does not allow it",
    ),
    _root(
        Failure.DRIVER,
        "ErrorDeviceLost|DeviceLostError",
        r"ErrorDeviceLost|DeviceLostError",
        kind="lost",
        cause="the card stopped answering in the middle of its work (device lost)",
        next_step="look in the kernel's log at that time (`dmesg`) for a reset of the card; update its driver, and lower --ubatch-size if one step takes seconds",
    ),
    _root(
        Failure.DRIVER,
        "ptxas fatal|PTX codegen",
        r"(?:ptxas|nvcc) fatal *: Value '(?P<card>sm_\w+)' is not defined|Internal Triton PTX codegen error",
        kind="kernel",
        cause="the compiler that came with the engine does not know this card's generation",
        next_step="update the engine with its PyTorch and Triton, or point TRITON_PTXAS_PATH at the ptxas of a CUDA that knows the card",
    ),
    _root(
        Failure.DRIVER,
        "nvcc fatal|build failed|build stopped|not find nvcc",
        r"nvcc fatal *: (?!Value ')(?P<what>.+)|[Nn]inja build failed|ninja: build stopped|(?P<what2>Could not find nvcc)",
        kind="compiler",
        cause="kernels are compiled at the start, and the CUDA compiler of this machine failed",
        next_step="install the CUDA toolkit (nvcc) of the version that PyTorch was built with and set CUDA_HOME, or take the engine's container image, which has it",
    ),
    _root(
        Failure.DRIVER,
        "No module named|cannot import name",
        r"(?m)^(?:[\w.]+: )?(?:ModuleNotFoundError: No module named '(?P<library>[^']+)'|ImportError: cannot import name '(?P<symbol>[^']+)' from)",
        kind="library",
    ),
    _root(
        Failure.DRIVER,
        "no kernel image|BinaryForGpu|unsupported toolchain",
        r"no kernel image is available for execution|hipErrorNoBinaryForGpu|PTX was compiled with an unsupported toolchain",
        kind="kernel",
        cause="the installed build holds no code for this card's generation",
        next_step="install a build of the engine and of PyTorch that was made for this card's compute capability",
    ),
    _root(
        Failure.DRIVER,
        "illegal memory access|device-side assert|misaligned address|unspecified launch|Memory access fault|illegal instruction was",
        r"(?P<what>illegal memory access|device-side assert|misaligned address|unspecified launch failure|Memory access fault by GPU|illegal instruction was encountered)",
        kind="kernel_fault",
        cause="a kernel on the card failed ({what})",
        next_step="update the engine; if it comes again, run once with CUDA_LAUNCH_BLOCKING=1 to learn which kernel, and look in the kernel's log for Xid lines",
    ),
    _root(
        Failure.DRIVER,
        "uncorrectable|fallen off the bus",
        r"uncorrectable (?P<what>ECC|NVLink) error|(?P<what2>fallen off the bus)",
        kind="card",
        cause="the card itself failed ({what})",
        next_step="take the machine out of service and have the card checked",
    ),
    _root(Failure.DRIVER, "NVRM: Xi", r"NVRM: Xid \(.*?\): (?P<xid>\d+)", kind="xid"),
    _root(
        Failure.DRIVER,
        "cannot open shared|undefined symbol|not found (required",
        r"(?P<library>lib[\w.+-]+\.so[\w.]*): cannot open shared object file|undefined symbol: (?P<symbol>\S+)|version `(?P<library2>[\w.]+)' not found \(required by",
        kind="library",
    ),
    _root(
        Failure.DRIVER,
        "CUBLAS_STATUS|CUDNN_STATUS|forward compatibility",
        r"(?P<what>CU(?:BLAS|DNN)_STATUS_(?!ALLOC)\w+)|(?P<what2>forward compatibility was attempted)",
        kind="library",
        cause="a CUDA library failed ({what})",
        next_step="install the CUDA libraries that this build of PyTorch was made for",
    ),
)

_HOST: tuple[Sign, ...] = (
    _root(
        Failure.SETTINGS,
        "weight quantization block",
        r"= (?P<part>\d+) is not divisible by weight quantization block_\w = (?P<block>\d+)",
        kind="split",
        cause="a weight of {part} rows or columns a card is no multiple of its quantisation's block of {block}",
        next_step="split tensors over fewer cards, or spread whole experts instead (expert parallelism)",
    ),
    _root(
        Failure.SETTINGS,
        "invalid device ordinal",
        r"invalid device ordinal",
        cause="a process asks for a card that is not there",
        next_step="set the tensor parallel size to the number of cards that `nvidia-smi -L` lists inside the container, and look at CUDA_VISIBLE_DEVICES",
    ),
    _root(
        Failure.SETTINGS,
        "no GPU available|allocate any GPUs",
        r"Current node has no GPU available|does not allocate any GPUs on the driver node",
        cause="Ray has no card for the node on which the server is started",
        next_step="run `ray status` there: start that node's Ray with its cards (--num-gpus), and end what still holds them",
    ),
    _root(
        Failure.SETTINGS,
        "forked subprocess",
        r"Cannot re-initialize CUDA in forked subprocess",
        cause="worker processes are forked from one that used the card already",
        next_step="start workers anew: VLLM_WORKER_MULTIPROCESSING_METHOD=spawn",
    ),
    _root(
        Failure.SETTINGS,
        "must be divisible|not divisible",
        r"\((?P<heads>\d+)\) must be divisible by tensor parallel size \((?P<tensor_parallel_size>\d+)\)|got `num_heads`: (?P<heads2>\d+) and `num_shards`: (?P<tensor_parallel_size2>\d+)|(?:Error|Exception): (?!.*divisible by (?:tensor parallel size \(|`num_shards`))(?P<what>.*(?:is not|must be) divisible by.*)",
        kind="split",
    ),
    _root(
        Failure.SETTINGS,
        "greater than the derived",
        r"(?<!Warning: )User-specified (?:max_model_len|context_length) \((?P<asked_tokens>\d+)\) is greater than the derived (?:max_model_len|context_length) .*?(?P<context_tokens>\d+)",
        cause="a context of {asked_tokens} tokens is asked for, and the model was made for {context_tokens}",
        next_step="set the context length to {context_tokens} at most (vLLM: max_model_len, SGLang: --context-length)",
    ),
    _root(
        Failure.SETTINGS,
        "unrecognized arguments|invalid argument:|unknown argument",
        r"error: unrecognized arguments?: (?P<what>\S+)|error: (?:invalid|unknown) argument: (?P<what2>\S+)|unexpected argument '(?P<what3>[^']+)' found",
        cause="the engine does not know the argument {what}",
        next_step="remove {what}, or update to a release that has it (`--help` lists them)",
    ),
    _root(
        Failure.SETTINGS,
        "number of available GPUs",
        r"(?:larger than|exceeds) the (?:total )?number of available GPUs",
        cause="more cards are asked for than the engine sees",
        next_step="set the tensor parallel size to the number of cards that `nvidia-smi -L` lists inside the container",
    ),
    _root(
        Failure.PORT_IN_USE,
        "ddress already in use|EADDRINUSE|couldn't bind|attempting to bind",
        r"[Aa]ddress already in use|EADDRINUSE|couldn't bind (?:to )?(?:HTTP )?server socket",
    ),
    _root(
        Failure.ACCESS_DENIED,
        "gated repo|GatedRepoError|Client Error|is restricted",
        r"gated repo|GatedRepoError|\d+ Client Error: (?:Unauthorized|Forbidden)",
        kind="gated",
        cause="the model's repository is not open to everyone, and the server has no token that may read it",
        next_step="accept the model's terms with an account, and give that account's token in HF_TOKEN",
    ),
    _root(
        Failure.ACCESS_DENIED,
        "ermission denied",
        r"PermissionError: .*?(?:'(?P<path>[^']+)')?$|[Pp]ermission denied(?:: '(?P<path2>[^']+)')?",
        kind="file",
    ),
    _root(Failure.DISK_FULL, "No space left", r"No space left on device(?:.*?'(?P<path>[^']+)')?"),
    _root(Failure.LIMITS, "Too many open files", r"Too many open files"),
    _root(
        Failure.SHARED_MEMORY,
        "shared memory|Bus error|shm",
        r"(?i)bus error.*shared memory|insufficient shared memory|unable to (?:open|write to|mmap|allocate) shared memory|error while creating shared memory|no space left.*/dev/shm",
    ),
    _root(
        Failure.KILLED,
        "Out of memory:|out of memory:",
        r"(?P<scope>Memory cgroup out of memory|Out of memory): Kill(?:ed)? process (?P<pid>\d+),? \((?P<program>[^)]*)\)",
        kind="oom_killer",
    ),
    _root(
        Failure.KILLED,
        "running low on memory",
        r"killed due to the node running low on memory",
        kind="container",
        alone=True,
        cause="Ray killed a worker because the node ran low on main memory",
        next_step="give the node more main memory, or load fewer copies of the weights at once",
    ),
    _root(
        Failure.KILLED,
        "OOMKilled",
        r"\"?OOMKilled\"?(?:\s?[:=]\s?true|\b(?![\"']?\s?[:=]))|Reason: +OOMKilled",
        kind="container",
    ),
    _root(
        Failure.KILLED,
        "as a result of limit",
        r"^(?:\[[ \d.]+\] )?Task in \S+ killed as a result of limit of",
        kind="container",
    ),
    _root(
        Failure.KILLED,
        "OOM killer|oom-kill",
        r"killed by the OOM killer|Failed with result 'oom-kill'",
        kind="unit",
        cause="the kernel killed the server because the memory of its unit, or of the machine, was used up",
        next_step="raise the unit's MemoryMax= and the machine's memory above what loading the weights needs",
    ),
)

_PEERS: tuple[Sign, ...] = (
    _sign(
        Role.PEER,
        "NCCL error|NCCL Error|ncclSystemError|ncclInternalError|ncclRemoteError|DistBackendError|ncclUnhandled",
        r"NCCL [Ee]rror\b.*?(?P<what>unhandled \w+ error|internal error|remote process exited[^,.]*|invalid usage)|(?P<what2>nccl(?:System|Internal|Remote|UnhandledCuda)Error)|DistBackendError",
        failure=Failure.COMMUNICATION,
        kind="nccl",
    ),
    _sign(
        Role.PEER,
        "collective operation timeout",
        r"Watchdog caught collective operation timeout: .*?OpType=(?P<operation>\w+).*?Timeout\(ms\)=(?P<timeout_ms>\d+)",
        failure=Failure.COMMUNICATION,
        kind="timeout",
    ),
    _sign(
        Role.PEER,
        "Connection closed by peer|Connection reset by peer|DistNetworkError|waiting for clients|peer access is not",
        r"(?i)gloo.*connection (?:closed|reset) by peer|Connection closed by peer|DistNetworkError|timed out .*waiting for clients|peer access is not supported",
        failure=Failure.COMMUNICATION,
        kind="peer",
    ),
    _sign(
        Role.PEER,
        "atchdog timeout|timed out|Health check",
        r"(?<!NCCL )[Ww]atchdog timeout \(self\.watchdog_timeout=(?P<timeout_seconds>\d+)|RPC call to (?P<what>\w+) timed out|Engine iteration timed out|Health check failed\. Server couldn't get a response",
        failure=Failure.HANG,
    ),
)

_LOSSES: tuple[Sign, ...] = (
    _sign(
        Role.LOSS,
        "exit code|exitcode|terminated with|exited with",
        r"(?i)exit ?code[:= ]*(?P<exit_code>-?\d+)|terminated with (?P<exit_code2>-?\d+)|exited with (?:exit )?(?:code|status) (?P<exit_code3>-?\d+)",
    ),
    _sign(Role.LOSS, "Exited (", r"\bExited \((?P<exit_code>\d+)\)"),
    _sign(
        Role.LOSS,
        "signal",
        r"(?:signaled to shutdown with|killed by|terminated by|received|[Cc]aught|[Ff]atal) signal:? (?P<signal>\d+)",
    ),
    _sign(
        Role.LOSS,
        "unexpectedly|process (pid",
        r"(?:Worker proc|[Aa]ctor|[Ww]orker) (?P<process>\S+)? ?died unexpectedly|Engine process \(pid \d+\) died|[Uu]nexpected(?:ly)? (?:exit|died)",
    ),
    _sign(Role.LOSS, "Main process exited", r"Main process exited, code=(?:killed|dumped), status=(?P<signal>\d+)/"),
    _sign(
        Role.LOSS,
        "terminated: signal",
        r"terminated: signal: (?P<signal_words>killed|aborted|segmentation fault|bus error|illegal instruction)",
    ),
    _sign(Role.LOSS, "Killed", r"(?:^|\d )Killed(?:\s|$)", kind="sigkill"),
    _sign(Role.LOSS, "SIGKILL|SIGSEGV|SIGABRT|SIGBUS|SIGILL", r"\b(?P<signal_name>SIG(?:KILL|SEGV|ABRT|BUS|ILL))\b"),
    _sign(
        Role.LOSS,
        "Segmentation fault|core dumped|Fatal Python error",
        r"(?P<signal_words>Segmentation fault|Aborted|Illegal instruction|Bus error)(?: \(core dumped\)|\b)",
    ),
    _sign(Role.LOSS, "GGML_ASSERT", r"GGML_ASSERT\((?P<what>.*)\) failed", kind="assertion"),
    _sign(
        Role.LOSS,
        "exec format error",
        r"exec format error",
        failure=Failure.CRASHED,
        kind="assertion",
        cause="the image or program was made for another kind of processor",
        next_step="take the image that was made for this machine (`uname -m`)",
    ),
    _sign(Role.LOSS, "Assertion ", r"Assertion [`'](?P<what>.*)' failed", kind="assertion"),
)

_AFTERMATH: tuple[Sign, ...] = (
    _aftermath(
        "EngineDeadError|Engine core initialization|EngineCore failed|encountered a fatal|output_handler failed|WorkerProc|fatal signal from worker",
        r"EngineDeadError|Engine core initialization failed|EngineCore (?:failed to start|hit an exception|encountered a fatal error)|output_handler failed|WorkerProc (?:failed to start|hit an exception|initialization failed)|fatal signal from worker",
        "vllm",
    ),
    _aftermath(
        "Background loop|background task failed|MQLLMEngine|Engine process failed|Engine loop",
        r"Background loop (?:has errored|is not running)|Engine background task failed|MQLLMEngine is already dead|Engine process failed to start|Engine loop is not running",
        "vllm",
    ),
    _aftermath(
        "sigquit|SIGQUIT|hit an exception|scheduler is dead",
        r"(?i:received sigquit|SIGQUIT received)|Scheduler hit an exception|scheduler is dead",
        "sglang",
    ),
    _aftermath(
        "exiting due to|failed to load model|create_context|failed to create context|unable to load model",
        r"exiting due to|failed to load model|failed to create_?context| unable to load model",
        "llamacpp",
    ),
    _aftermath("ggml-|error:", r"ggml[\w./-]*:\d+: \w+ error", "llamacpp"),
    _aftermath(
        "ShardCannotStart|ShardFailed|WebserverFailed|Shard |Webserver|Shutting down shards",
        r"ShardCannotStart|ShardFailed|WebserverFailed|Shard \d+ (?:failed to start|crashed)|Webserver [Cc]rashed|Shutting down (?:all )?shards",
        "tgi",
    ),
    _aftermath(
        "Failed core proc|RuntimeError: cancelled|ActorDiedError|ChildFailedError",
        r"Failed core proc|RuntimeError: cancelled|ActorDiedError|ChildFailedError",
    ),
    _aftermath("Finished server process", r"Finished server process"),
)

_REQUESTS: tuple[Sign, ...] = (
    _sign(
        Role.REQUEST,
        "Input validation error|must have less than",
        r"Input validation error|must have less than \d+ tokens",
        failure=Failure.REQUEST_REFUSED,
        kind="too long",
        engine="tgi",
    ),
    _sign(
        Role.REQUEST,
        "parse_error|is required|ValidationError|NotFoundError|BadRequestError|invalid_request_error|type must be|does not exist",
        r"json\.exception\.\w+|'messages' is required|RequestValidationError|type='(?:NotFoundError|BadRequestError)'|invalid_request_error|json parse error",
        failure=Failure.REQUEST_REFUSED,
        kind="bad field",
    ),
    _sign(
        Role.REQUEST,
        "Bad Request|Unprocessable|Unauthorized",
        r"\"POST \S+ HTTP/[\d.]+\" \d+ (?:Bad Request|Unprocessable|Unauthorized)",
        failure=Failure.REQUEST_REFUSED,
        kind="bad field",
    ),
    _sign(
        Role.REQUEST,
        "equest|onnect",
        r"(?i)request \S* ?(?:has )?timed out|timed out waiting for (?:a )?(?:slot|response)|(?:ClientDisconnect|client disconnected)",
        failure=Failure.REQUEST_REFUSED,
        kind="time-out",
    ),
)

_COMPLAINED = {
    Complaint.OUT_OF_MEMORY: (Role.MEMORY, "memory|Memory|cudaMalloc|allocate"),
    Complaint.KV_CACHE_FULL: (Role.POOL, "KV cache|cache blocks|memory|Memory|Context size|KV size"),
    Complaint.PROMPT_TOO_LONG: (Role.REQUEST, "context|maximum|max_model_len"),
}


def _complaints() -> tuple[Sign, ...]:
    """The engines' own tables as signs; what all engines share is taken once."""
    signs: dict[str, Sign] = {}
    for engine in ENGINES.values():
        for complaint, pattern in engine.dialect.complaints:
            role, needles = _COMPLAINED[complaint]
            shared = pattern.pattern in signs
            refused = role is Role.REQUEST
            signs[pattern.pattern] = Sign(
                role,
                _needles(needles),
                pattern,
                engine="" if shared else engine.name,
                failure=Failure.REQUEST_REFUSED if refused else None,
                kind="too long" if refused else "",
            )
    return tuple(signs.values())


SIGNS: tuple[Sign, ...] = (
    *_NOTES,
    *_LIFE,
    *_PHASES,
    *_FILES,
    *_MEMORY,
    *_DRIVER,
    *_HOST,
    *_PEERS,
    *_LOSSES,
    *_AFTERMATH,
    *_REQUESTS,
    *_complaints(),
)
"""All rows, in the order in which a line is tried against them."""

_SIZE = r"[\d.]+ ?[KMGTk]?i?B"

FIGURES: tuple[re.Pattern[str], ...] = tuple(
    re.compile(pattern)
    for pattern in (
        # PyTorch, old and new
        rf"Tried to allocate (?P<asked_bytes>{_SIZE})",
        # capacty: as PyTorch 2.1 spelt it
        rf"total capaci?ty of (?P<total_bytes>{_SIZE})|(?P<total_bytes2>{_SIZE}) total capacity",
        rf"of which (?P<free_bytes>{_SIZE}) is free|(?P<free_bytes2>{_SIZE}) free;",
        rf"this process has (?P<own_bytes>{_SIZE}) memory in use",
        rf"(?P<allocated_bytes>{_SIZE}) is allocated by PyTorch|(?P<allocated_bytes2>{_SIZE}) already allocated",
        rf"(?P<fragmented_bytes>{_SIZE}) is reserved by PyTorch but unallocated",
        r"\bGPU (?P<gpu>\d+)\b|on device (?P<gpu2>\d+)\b",
        # vLLM
        r"max seq len \((?P<context_tokens>\d+)\)",
        rf"\((?P<needed_bytes>{_SIZE}) KV cache is needed",
        rf"available KV cache memory \((?P<available_bytes>{_SIZE})\)",
        r"maximum model length is (?P<fits_tokens>\d+)|stored in KV cache \((?P<fits_tokens2>\d+)\)",
        r"Free memory on device(?: \S+)? \((?P<free_gib>[\d.]+)/(?P<total_gib>[\d.]+) GiB\)",
        r"desired GPU memory utilization \((?P<utilization_ratio>[\d.]+), (?P<wanted_gib>[\d.]+) GiB\)",
        # SGLang
        r"mem_fraction_static=(?P<utilization_ratio>[\d.]+)",
        r"Try to allocate (?P<asked_tokens>\d+) tokens",
        # llama.cpp
        r"allocating (?P<asked_bytes>[\d.]+ MiB) on device|attempted to allocate +(?P<asked_bytes2>[\d.]+ MB)|(?:buffer|allocation) of size (?P<asked_bytes3>\d+)|Requested *: (?P<asked_bytes4>[\d.]+ \w+)",
        # requests
        r"maximum context length is (?P<context_tokens>\d+) tokens|available context size \((?P<context_tokens2>\d+)",
        r"requested (?P<asked_tokens>\d+) tokens|request \((?P<asked_tokens2>\d+) tokens\)|(?P<asked_tokens3>\d+) (?:input |prompt )?tokens? \(",
        # the kernel
        r"anon-rss:(?P<resident_bytes>\d+kB)",
    )
)
"""Figures in a line that names a cause. A digit at the end of a group's name only tells alternatives apart."""

FACTS: tuple[tuple[tuple[bytes, ...], re.Pattern[str]], ...] = tuple(
    (_needles(needles), re.compile(pattern))
    for needles, pattern in (
        (
            "non-default args|Namespace(|Initializing a",
            r"'?gpu_memory_utilization'?[:=] ?(?P<utilization_ratio>[\d.]+)",
        ),
        ("server_args=", r"mem_fraction_static=(?P<utilization_ratio>[\d.]+)"),
        (
            "non-default args|Namespace(|Initializing a",
            r"(?:'max_model_len': |max_model_len=|max_seq_len=)(?P<context_tokens>\d+)",
        ),
        ("server_args=", r"context_length=(?P<context_tokens>\d+)"),
        ("non-default args|Namespace(", r"(?:'max_num_seqs': |max_num_seqs=)(?P<max_batch_size>\d+)"),
        ("non-default args|Namespace(|max_num_batched_tokens", r"max_num_batched_tokens'?[:=] ?(?P<step_tokens>\d+)"),
        ("server_args=", r"max_running_requests=(?P<max_batch_size>\d+)"),
        (
            "non-default args|Namespace(|Initializing a",
            r"(?:'tensor_parallel_size': |tensor_parallel_size=)(?P<tensor_parallel_size>\d+)",
        ),
        ("server_args=", r"\btp_size=(?P<tensor_parallel_size>\d+)"),
        ("non-default args|Namespace(|server_args=", r"'?port'?[:=] ?(?P<port>\d+)"),
        ("Available KV cache memory", r"Available KV cache memory: (?P<available_gib>-?[\d.]+) GiB"),
        ("oading", r"(?:Model loading|Loading model weights) took (?P<weights_bytes>[\d.]+ \w+)"),
        ("Load weight begin", r"Load weight begin\. avail mem=(?P<before_weights_bytes>[\d.]+ GB)"),
        ("Load weight end", r"Load weight end\..*avail mem=(?P<after_weights_bytes>[\d.]+ GB)"),
        ("n_ctx", r"llama\w*: n_ctx +?= (?P<context_tokens>\d+)"),
        ("n_seq_max|n_slots", r"n_(?:seq_max|slots) += (?P<max_batch_size>\d+)"),
        ("n_ctx_slot", r"n_ctx_slot = (?P<context_tokens>\d+), kv_unified = 'true'"),
        ("MiB free", r"using device \S+ .*?- (?P<free_at_start_bytes>\d+ MiB) free"),
        ("model buffer size", r"(?:CUDA|ROCm|Vulkan|SYCL)\d* model buffer size = +(?P<weights_bytes>[\d.]+ MiB)"),
        ("port:", r"hostname: \S+, port: (?P<port>\d+)"),
        (
            "startup is less|on startup",
            r"Free memory on device(?: \S+)? \((?P<free_gib>[\d.]+)/(?P<total_gib>[\d.]+) GiB\)",
        ),
    )
)
"""Figures of the start that advice is worked out from; a later line replaces an earlier one."""
