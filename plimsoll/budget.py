"""`plimsoll budget CONFIG.json`: what a card's memory is spent on, and the batch size that fits into the rest."""

import argparse
import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from plimsoll.arguments import number, whole
from plimsoll.report import clean
from serving.budget import Ask, Budget, Demand, ask_for, cache_kind, work_out
from serving.cards import find_card
from serving.engines import ENGINES
from serving.errors import ConfigError
from serving.model import BUILT_IN_MODELS, ModelShape, read_model
from serving.settings import Scalar, SettingEntry, Settings, backup, read_settings, stale_warning, write_settings

if TYPE_CHECKING:
    from monitor.machine import Machine
    from serving.weights import WeightsCheck

__all__ = ["EXAMPLES", "add_arguments", "run"]

EXAMPLES = """examples:
  plimsoll budget /models/hy3/config.json --gpu h200 --gpus 8 --expert-parallel 8 --mean-tokens 6000
  plimsoll budget hy3 --gpu h200 --gpus 8 --context 65536 --write hy3-serving.yaml
  plimsoll budget /models/qwen3-8b --local --weights
  plimsoll budget llama-3.1-8b --gpu-memory 24GiB --engine llamacpp --gpu-layers 24 --weight-bits 4.85"""

_GIB: Final = 2**30
_PARALLEL = whole(1, 65_536)
_TOKENS = whole(1, 1_000_000_000)
_PLAIN_KV_BITS: Final = 16.0
_UNITS: Final = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40, "KB": 10**3, "MB": 10**6}
_UNITS_MORE: Final = {"GB": 10**9, "TB": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def _size(text: str) -> int:
    """Bytes, written as 24GiB, 80GB or 85899345920."""
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,6})?) ?([A-Za-z]{0,3})", text.strip())
    unit = (_UNITS | _UNITS_MORE).get(match[2].upper()) if match else None
    if match is None or unit is None:
        raise argparse.ArgumentTypeError(f"{text[:60]!r} is not a size: write 24GiB, 80GB or a number of bytes")
    size = round(float(match[1]) * unit)
    if not 2**28 <= size <= 2**50:
        raise argparse.ArgumentTypeError(f"{text[:60]!r} is no memory of a card; write it with its unit, as in 24GiB")
    return size


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument(
        "model",
        metavar="CONFIG.json",
        nargs="?",
        help=f"a config.json, a folder that has one, a GGUF file, or a name: {', '.join(BUILT_IN_MODELS)}",
    )
    parser.add_argument("--settings", type=Path, metavar="FILE", help="serving settings; options stand before them")
    where = parser.add_argument_group("the cards")
    card = where.add_mutually_exclusive_group()
    card.add_argument("--gpu", metavar="NAME", help="the card's name, e.g. h200")
    card.add_argument("--gpu-memory", type=_size, metavar="SIZE", help="a card's memory, e.g. 24GiB")
    card.add_argument("--local", action="store_true", help="this machine's cards, with what is free of them")
    where.add_argument("--gpus", type=_PARALLEL, metavar="N", help="how many of them (default: what the split needs)")
    split = parser.add_argument_group("how the model is divided: decided first, and everything else follows from it")
    split.add_argument("--tensor-parallel", type=_PARALLEL, metavar="N", help="cards that share each layer")
    split.add_argument("--pipeline-parallel", type=_PARALLEL, metavar="N", help="stages of layers")
    split.add_argument("--data-parallel", type=_PARALLEL, metavar="N", help="copies of the model")
    split.add_argument(
        "--expert-parallel", type=_PARALLEL, metavar="N", help="cards over which whole experts are spread"
    )
    what = parser.add_argument_group("what is served")
    what.add_argument("--engine", choices=tuple(ENGINES), help="the engine (default: vllm)")
    what.add_argument("--release", metavar="R", help="its release (default: the newest that is known)")
    what.add_argument("--context", type=_TOKENS, metavar="N", help="longest prompt plus output (default: the model's)")
    what.add_argument("--mean-tokens", type=_TOKENS, metavar="N", help="mean prompt plus output of a request")
    what.add_argument("--long-tokens", type=_TOKENS, metavar="N", help="those of a long request (default: the context)")
    what.add_argument("--long-share", type=number(0, 1), default=0.0, metavar="R", help="share of long requests, 0..1")
    what.add_argument("--max-batch", type=_PARALLEL, metavar="N", help="see whether so many requests fit")
    what.add_argument("--token-budget", type=_TOKENS, metavar="N", help="tokens of one step")
    what.add_argument("--mtp", type=whole(0, 64), metavar="N", help="modules for multi-token prediction in use")
    what.add_argument("--weight-bits", type=number(1, 32), metavar="B", help="bits of a weight (default: the model's)")
    kv = what.add_mutually_exclusive_group()
    kv.add_argument("--kv-bits", type=number(1, 32), metavar="B", help="bits of an element of the KV cache (16)")
    kv.add_argument("--kv-dtype", metavar="T", help="its type as the engine names it, e.g. fp8 or q8_0")
    what.add_argument(
        "--utilization", type=number(0.01, 1), metavar="U", help="share of a card that the engine may take"
    )
    what.add_argument("--no-graphs", action="store_true", help="decode steps are not captured as graphs")
    what.add_argument("--gpu-layers", type=whole(0, 100_000), metavar="N", help="llama.cpp's -ngl: layers on the cards")
    what.add_argument(
        "--cpu-moe-layers", type=whole(0, 100_000), metavar="N", help="llama.cpp's --n-cpu-moe: experts in main memory"
    )
    parser.add_argument(
        "--weights",
        nargs="?",
        const=True,
        metavar="FOLDER",
        help="check the files of the weights, and take their true size (default: the model's folder)",
    )
    parser.add_argument("--write", type=Path, metavar="SETTINGS.yaml", help="write serving settings with their reasons")
    parser.add_argument("--force", action="store_true", help="let --write replace a file, which is backed up first")
    parser.add_argument("--json", action="store_true", help="print one JSON document on stdout")


def run(arguments: argparse.Namespace) -> int:
    """Budget, print, and write where that is asked for. Exit code 0 when it fits, 1 when it does not."""
    settings = read_settings(arguments.settings) if arguments.settings is not None else None
    if arguments.write is not None:
        _check_place(arguments.write, may_replace=arguments.force)
    source = arguments.model or (settings.model if settings is not None else None)
    if source is None:
        raise ConfigError("no model: give a config.json, or --settings with a model in it")
    model = read_model(source)
    machine = _machine() if arguments.local else None
    ask = _ask(arguments, settings or Settings(path="(command line)"), model, machine)
    check = _check_weights(arguments, source) if arguments.weights else None
    short = None if check is None or not check.is_whole else _short(ask, check)
    if check is not None and check.is_whole and check.total_bytes and short is None:
        ask = replace(ask, weights_bytes=_true_bytes(ask, check.total_bytes))
    kept = _kept(arguments, settings, ask) if arguments.write is not None else {}
    found = work_out(ask)
    written = None
    if arguments.write is not None and found.holds_asked:
        written = _write(arguments, found, source, kept)
    document = _document(arguments, found, settings, machine, check, written)
    missing = None if machine is None else _missing_memory(found, machine)
    document["warnings"] += [problem for problem in (short, missing) if problem is not None]
    if arguments.json:
        print(json.dumps(document, allow_nan=False))
    else:
        _print(found, document, machine, Console(soft_wrap=True), may_write=arguments.write is not None)
    good = found.holds_asked and short is None and missing is None and (check is None or check.is_whole)
    return 0 if good else 1


def _missing_memory(found: Budget, machine: "Machine") -> str | None:
    """That the weights which stay in main memory do not fit there."""
    wanted, free = found.terms.host_weights, machine.memory.available_bytes
    if free is None or wanted <= free:
        return None
    return (
        f"{_gib(wanted)} of weights are to stay in main memory, and {_gib(free)} of it are free: put more layers on "
        "the cards, or take weights in fewer bits"
    )


def _check_place(path: Path, *, may_replace: bool) -> None:
    try:
        is_there = path.exists()
    except OSError as error:
        raise ConfigError(f"--write {str(path)[:200]}: {error.strerror or error}") from error
    if is_there and not may_replace:
        raise ConfigError(f"--write {path}: exists already; name another file, or add --force (it is backed up)")


def _machine() -> "Machine":
    # Reading cards needs NVML, which a budget on paper does not.
    import asyncio

    from monitor.gpu import gpu_reader
    from monitor.machine import read_machine

    async def describe() -> "Machine":
        reader = gpu_reader("auto")
        try:
            return read_machine(await reader.describe())
        finally:
            await reader.close()

    return asyncio.run(describe())


def _given(arguments: argparse.Namespace) -> dict[str, Any]:
    """The settings that the command line gives, by their canonical keys."""
    given = {
        "engine": arguments.engine,
        "tensor_parallel_size": arguments.tensor_parallel,
        "pipeline_parallel_size": arguments.pipeline_parallel,
        "data_parallel_size": arguments.data_parallel,
        "expert_parallel_size": arguments.expert_parallel,
        "max_model_len": arguments.context,
        "max_batch_size": arguments.max_batch,
        "max_num_batched_tokens": arguments.token_budget,
        "mtp_layers": arguments.mtp,
        "kv_cache_dtype": arguments.kv_dtype,
        "gpu_memory_utilization": arguments.utilization,
        "gpu_layers": arguments.gpu_layers,
        "cpu_moe_layers": arguments.cpu_moe_layers,
    }
    return {key: value for key, value in given.items() if value is not None}


def _ask(arguments: argparse.Namespace, settings: Settings, model: ModelShape, machine: "Machine | None") -> Ask:
    if arguments.settings is not None and arguments.max_batch is None:
        # What fits is asked for, and not whether the old figure does.
        settings = replace(settings, max_batch_size=None)
    settings = replace(settings, **_given(arguments))
    if arguments.expert_parallel is not None:
        settings = replace(settings, enable_expert_parallel=None)
    name, size, free, there = _card(arguments, settings, machine)
    split = (settings.tensor_parallel_size or 1) * (settings.pipeline_parallel_size or 1)
    cards = arguments.gpus or settings.gpus or there
    ask = ask_for(
        settings,
        model,
        card_bytes=size,
        card_name=name,
        cards=cards or split * (settings.data_parallel_size or 1),
    )
    demand = None
    if arguments.mean_tokens is not None:
        demand = Demand(arguments.mean_tokens, arguments.long_tokens, arguments.long_share)
    elif arguments.long_tokens is not None or arguments.long_share:
        raise ConfigError("--long-tokens and --long-share say nothing without --mean-tokens: give the mean length too")
    for flag, tokens in (("--mean-tokens", arguments.mean_tokens), ("--long-tokens", arguments.long_tokens)):
        if tokens is not None and tokens > ask.context:
            raise ConfigError(
                f"{flag} {tokens}: longer than the context of {ask.context}, which no request may be; raise --context, "
                "or give the length that requests really have"
            )
    if arguments.weight_bits is not None:
        ask = ask.with_weight_bits(arguments.weight_bits)
    return replace(
        ask,
        release=arguments.release,
        kv_bits=arguments.kv_bits or ask.kv_bits,
        demand=demand,
        free_bytes=free,
        graphs=not arguments.no_graphs,
    )


def _card(
    arguments: argparse.Namespace, settings: Settings, machine: "Machine | None"
) -> tuple[str, int, int | None, int | None]:
    """(name, memory, free memory, how many there are) of a card."""
    if machine is not None:
        cards = [card for card in machine.cards if card.memory_total_bytes]
        if not cards:
            why = "; ".join(machine.notes[:1]) or "none is seen"
            raise ConfigError(f"--local: no card to budget on this machine ({why}); give --gpu or --gpu-memory")
        names = {card.name for card in cards}
        if len(names) > 1:
            raise ConfigError(
                f"--local: the cards are of different kinds ({', '.join(sorted(names))}); give --gpu and --gpus for "
                "those that the server is to use"
            )
        total = min(int(card.memory_total_bytes or 0) for card in cards)
        frees = [card.memory_free_bytes for card in cards if card.memory_free_bytes is not None]
        return cards[0].name, total, int(min(frees)) if frees else None, len(cards)
    if arguments.gpu_memory is not None:
        return "", arguments.gpu_memory, None, None
    name = arguments.gpu or settings.gpu
    if name is None:
        raise ConfigError("no card: give --gpu NAME, --gpu-memory SIZE or --local")
    card = find_card(name)
    return card.name, card.memory_bytes, None, None


def _check_weights(arguments: argparse.Namespace, source: str) -> "WeightsCheck":
    from serving.weights import check_weights

    folder = Path(source if arguments.weights is True else arguments.weights)
    if folder.suffix == ".json":
        folder = folder.parent
    if not folder.exists():
        raise ConfigError(f"--weights {folder}: there is no such folder; give the one that the weights are in")
    return check_weights(folder)


def _short(ask: Ask, check: "WeightsCheck") -> str | None:
    """That files which are whole by themselves are far less than the model; None where they are not."""
    expected, there = ask.model.weight_bytes().total, check.total_bytes or 0
    if check.format not in ("safetensors", "gguf") or there >= _LEAST_SHARE * expected:
        return None
    return (
        f"{check.source}: the files hold {_gib(there)} of weights and {ask.model.name} has {_gib(expected)} by its "
        "configuration: files are missing, or are another model's; the configuration is budgeted"
    )


_LEAST_SHARE: Final = 0.85
"""Smaller files than this share of what the shape says are not the model; tensors that are stored once for two are less
than that."""


def _true_bytes(ask: Ask, total: int) -> int:
    """Weights on the fullest card, scaled from what the files hold to what the shape says.

    Some publishers put the modules for multi-token prediction into the same files, which are loaded only when used.
    """
    model = ask.model
    sizes = (model.weight_bytes().total, model.weight_bytes(mtp_layers=len(model.mtp)).total)
    whole_bytes = min(sizes, key=lambda size: abs(total - size))
    return round(ask.model.weight_bytes(ask.split, mtp_layers=ask.mtp_layers).total * total / whole_bytes)


# ---- what is said


def _document(
    arguments: argparse.Namespace,
    found: Budget,
    settings: Settings | None,
    machine: "Machine | None",
    check: "WeightsCheck | None",
    written: str | None,
) -> dict[str, Any]:
    ask, model = found.ask, found.ask.model
    stale = None if settings is None else stale_warning(settings, _inputs(found, arguments))
    warnings = [stale] if stale else []
    return {
        "schema": "plimsoll.budget/1",
        "verdict": "pass" if found.holds_asked else "fail",
        "reason": found.reason,
        "model": {
            "name": model.name,
            "architecture": model.architecture,
            "total_parameters": model.total_parameters,
            "active_parameters": model.active_parameters,
            "mtp_parameters": model.mtp_parameters,
            "layers": len(model.layers),
            "context_tokens": model.context_tokens,
        },
        "engine": ask.engine,
        "card": {"name": ask.card_name or None, "memory_bytes": ask.card_bytes, "free_bytes": ask.free_bytes},
        "cards": ask.cards,
        "split": {**asdict(ask.split), "data": ask.copies},
        "per_card": asdict(found.terms),
        "context_tokens": ask.context,
        "mean_tokens": ask.demand.mean_tokens if ask.demand is not None else None,
        "kv_bytes_per_token": found.token_bytes,
        "kv_bytes_per_mean_request": found.mean_bytes,
        "kv_bytes_per_longest_request": found.longest_bytes,
        "kv_tokens": found.kv_tokens,
        "max_concurrency_at_context": round(found.kv_tokens / ask.context, 2),
        "max_batch_size": found.max_batch or None,
        "max_batch_size_range": list(found.max_batch_range),
        "bound_by": found.bound_by,
        "steps": [asdict(step) for step in found.steps],
        "is_tuning_result": not ask.is_offloaded,
        "notes": list(found.notes),
        "machine": None if machine is None else asdict(machine),
        "weights_check": None if check is None else _weights(check),
        "written": written,
        "warnings": warnings,
    }


def _weights(check: "WeightsCheck") -> dict[str, Any]:
    return {
        "source": str(check.source),
        "format": check.format,
        "files": check.files,
        "tensors": check.tensors,
        "bytes_by_dtype": dict(check.bytes_by_dtype),
        "quantisation": check.quantisation,
        "is_whole": check.is_whole,
        "findings": [
            {"level": one.level.value, "what": one.what, "where": one.where, "next_step": one.next_step}
            for one in check.findings
        ],
    }


def _print(
    found: Budget, document: dict[str, Any], machine: "Machine | None", console: Console, *, may_write: bool
) -> None:
    ask, terms, model = found.ask, found.terms, found.ask.model
    colour = "green" if found.holds_asked else "red"
    split = ask.split
    parts = [f"{split.tensor} tensor"]
    parts += [f"{split.pipeline} pipeline"] if split.pipeline > 1 else []
    parts += [f"{split.expert} expert"] if split.expert > 1 else []
    parts += [f"{ask.copies} data"] if ask.copies > 1 else []
    cards = f"{ask.cards} x {ask.card_name or 'card'} ({_gib(ask.card_bytes)})"
    console.print(
        f"{escape(model.name)}: {model.total_parameters / 1e9:.1f} B parameters, {model.active_parameters / 1e9:.1f} B "
        f"active; {ask.engine} on {escape(cards)}, split {', '.join(parts)}",
        highlight=False,
    )
    table = Table(box=box.SIMPLE_HEAD, header_style="dim", pad_edge=False)
    table.add_column("memory of a card")
    table.add_column("GiB", justify="right")
    table.add_column("share", justify="right")
    table.add_column("from")
    for name, size, reason in _rows(found):
        if size or name in ("weights", "KV cache"):
            table.add_row(name, f"{size / _GIB:.2f}", f"{size / ask.card_bytes:.0%}", f"[dim]{escape(reason)}[/]")
    console.print(table)
    low, high = found.max_batch_range
    copy = " of each copy" if ask.copies > 1 else ""
    if found.fits:
        asked = ""
        if not found.holds_asked:
            wanted = (ask.max_batch or 1) * ask.copies
            asked = f"[{colour} bold]{wanted} requests at once do not fit[/]; what does is "
        console.print(
            f"{asked}[{colour} bold]max_batch_size {found.max_batch}[/]  (likely {low} to {high}); the KV cache{copy} "
            f"holds {found.kv_tokens:,} tokens, {found.kv_tokens / ask.context:.1f} requests of {ask.context:,}",
            highlight=False,
        )
    else:
        console.print(f"[{colour} bold]does not fit[/]", highlight=False)
    console.print(f"{found.bound_by.replace('_', ' ')} binds: {escape(found.reason)}", highlight=False)
    if found.steps:
        console.print("one step of a retreat, in the order in which to try them:")
        steps = Table(box=None, pad_edge=False, show_header=False)
        for step in found.steps:
            after = f"max_batch_size {step.max_batch}" if step.max_batch else "still does not fit"
            steps.add_row(f"  {step.kind}", step.change, after, f"[dim]{escape(step.price)}[/]")
        console.print(steps)
    if machine is not None:
        from monitor.machine import machine_lines

        for label, text in machine_lines(machine):
            console.print(f"[dim]{f'{label}: ' if label else '  '}{escape(clean(text))}[/]", highlight=False)
    for line in [*document["warnings"], *found.notes]:
        console.print(f"[dim]{escape(clean(line))}[/]", highlight=False)
    check = document["weights_check"]
    if check is not None:
        for one in check["findings"]:
            said = f"{one['where']}: {one['what']}" + (f"; {one['next_step']}" if one["next_step"] else "")
            console.print(f"weights: {one['level']}: {escape(clean(said))}", highlight=False)
    if terms.kv_cache < 0:
        console.print(f"[dim]the KV cache would be {_gib(terms.kv_cache)}: nothing is left for it[/]", highlight=False)
    if document["written"]:
        console.print(f"written: {escape(document['written'])}", highlight=False)
    elif may_write:
        console.print("not written: what does not fit is no settings file", highlight=False)


def _rows(found: Budget) -> list[tuple[str, int, str]]:
    ask, terms = found.ask, found.terms
    layers = f"{len(ask.model.layers)} layers"
    share = "of the engine's share" if ask.utilization else "of the engine's default share"
    return [
        ("weights", terms.weights, f"{layers}, divided as the split says"),
        ("KV cache", terms.kv_cache, f"what is left {share}; {found.token_bytes:,} bytes a token"),
        ("communication", terms.communication, "code, and buffers between cards (estimated)"),
        ("workspace", terms.workspace, f"a step of {found.token_budget:,} tokens, logits and sampling (estimated)"),
        ("CUDA graphs", terms.graphs, "captured decode steps (estimated)"),
        ("reserve", terms.reserve, "left alone: the driver's, and the share that the engine may not take"),
        ("other processes", terms.elsewhere, "in use before the start"),
        ("in main memory", terms.host_weights, "weights that are not on the cards"),
    ]


def _gib(size: float) -> str:
    return f"{size / _GIB:.1f} GiB"


# ---- the serving file


def _inputs(found: Budget, arguments: argparse.Namespace) -> dict[str, Scalar]:
    """What the batch size was derived from, by the keys of `derived_from`."""
    ask = found.ask
    inputs: dict[str, Scalar] = {
        "tensor_parallel_size": ask.split.tensor,
        "pipeline_parallel_size": ask.split.pipeline,
        "data_parallel_size": ask.copies,
        "expert_parallel_size": ask.split.expert,
        "gpus": ask.cards,
        "max_model_len": ask.context,
        "kv_bits": ask.kv_bits,
        "mean_tokens": (ask.demand or Demand(min(4096, ask.context))).mean_tokens,
    }
    if ask.card_name:
        inputs["gpu"] = ask.card_name
    else:
        inputs["gpu_memory_gib"] = round(ask.card_bytes / _GIB, 2)
    told = {
        "gpu_memory_utilization": ask.utilization,
        "max_num_batched_tokens": ask.token_budget,
        "mtp_layers": ask.mtp_layers or None,
        "gpu_layers": ask.gpu_layers,
        "cpu_moe_layers": ask.cpu_moe_layers or None,
    }
    inputs |= {key: value for key, value in told.items() if value is not None}
    if arguments.weight_bits is not None:
        inputs["weight_bits"] = arguments.weight_bits
    if ask.demand is not None and ask.demand.long_share:
        inputs["long_share_ratio"] = ask.demand.long_share
        inputs["long_tokens"] = ask.demand.long_tokens or ask.context
    return inputs


def _kept(arguments: argparse.Namespace, settings: Settings | None, ask: Ask) -> dict[str, Scalar]:
    """What the file that was read says besides, and the type of the KV cache that was counted on.

    Raises:
        ConfigError: the engine has no cache of so many bits, so that no file could ask for it.
    """
    kinds = {"kv_cache_dtype", "kv_cache_dtype_k", "kv_cache_dtype_v"}
    dropped = _DERIVED_ANEW | _given(arguments).keys()
    if arguments.expert_parallel is not None:
        dropped |= {"enable_expert_parallel"}
    if arguments.kv_dtype is not None or arguments.kv_bits is not None:
        dropped |= kinds
    kept = {} if settings is None else {key: value for key, value in settings.values().items() if key not in dropped}
    if arguments.kv_dtype is not None:
        kept["kv_cache_dtype"] = arguments.kv_dtype
    elif arguments.kv_bits is not None:
        kept["kv_cache_dtype"] = cache_kind(ask.engine, arguments.kv_bits)
    return kept


_DERIVED_ANEW: Final = frozenset(
    {
        "gpu",
        "pipeline_parallel_size",
        "data_parallel_size",
        "expert_parallel_size",
        "kv_cache_capacity_tokens",
    }
)
"""What a file that was read says and a new one says otherwise, or not at all."""


def _write(arguments: argparse.Namespace, found: Budget, source: str, kept: dict[str, Scalar]) -> str:
    ask, split = found.ask, found.ask.split
    path: Path = arguments.write
    entries = [
        SettingEntry("model", source, "what was budgeted"),
        SettingEntry("engine", ask.engine, ""),
        SettingEntry("gpus", ask.cards, ""),
        SettingEntry("tensor_parallel_size", split.tensor, "fixed first: everything below follows from the split"),
    ]
    if ask.card_name:
        entries.insert(2, SettingEntry("gpu", ask.card_name, ""))
    if split.pipeline > 1:
        entries.append(SettingEntry("pipeline_parallel_size", split.pipeline, "stages of layers"))
    if ask.copies > 1:
        entries.append(SettingEntry("data_parallel_size", ask.copies, "copies of the model"))
    if split.expert > 1:
        reason = f"whole experts over {split.expert} cards; divides expert weights and nothing else"
        entries.append(SettingEntry("expert_parallel_size", split.expert, reason))
    longest = (
        f"the model's is {ask.model.context_tokens:,}; one such request takes {_gib(found.longest_bytes)} of a card"
    )
    entries.append(SettingEntry("max_model_len", ask.context, longest))
    demand = ask.demand
    mean = f"{demand.mean_tokens:,} tokens a request" if demand is not None else "an assumed mean length"
    why = (
        f"{found.kv_tokens:,} tokens of KV cache at {mean}, with room kept for a long request; likely "
        f"{found.max_batch_range[0]} to {found.max_batch_range[1]}"
    )
    entries.append(SettingEntry("max_batch_size", found.max_batch, why))
    if ask.utilization is not None:
        left = f"leaves {_gib(found.terms.reserve)} of a card to the driver, fragments and other programs"
        entries.append(SettingEntry("gpu_memory_utilization", ask.utilization, left))
    if ask.token_budget is not None:
        entries.append(SettingEntry("max_num_batched_tokens", ask.token_budget, "tokens of one step"))
    if ask.mtp_layers:
        entries.append(SettingEntry("mtp_layers", ask.mtp_layers, "draft tokens ahead; takes weights and KV cache"))
    if ask.gpu_layers is not None:
        entries.append(SettingEntry("gpu_layers", ask.gpu_layers, "the rest in main memory: no tuning result"))
    if ask.cpu_moe_layers:
        entries.append(
            SettingEntry("cpu_moe_layers", ask.cpu_moe_layers, "their experts in main memory: no tuning result")
        )
    named = {entry.key for entry in entries}
    for key, value in kept.items():
        if key not in named:
            narrow = key.startswith("kv_cache_dtype") and ask.kv_bits < _PLAIN_KV_BITS
            entries.append(SettingEntry(key, value, "probe the answers' quality before use" if narrow else ""))
    entries.append(
        SettingEntry("derived_from", _inputs(found, arguments), "max_batch_size is void when one of these changes")
    )
    heading = (
        f"Serving settings for {ask.model.name}, from its shape and the memory of {ask.cards} x "
        f"{ask.card_name or _gib(ask.card_bytes)}. Check them against the start-up log (`plimsoll check`), then prove "
        "max_batch_size (`plimsoll stress`)."
    )
    if path.exists():
        backup(path, reason="replaced by plimsoll budget --write")
    write_settings(path, entries, heading=heading, overwrite=arguments.force)
    return str(path)
