"""The memory budget against what public start-up reports printed: one table of all errors.

    python benchmarks/budget.py                 # the half of the reports that the budget was set with
    python benchmarks/budget.py --all           # and the half that was kept back

`KV tokens | KV bytes` is the error of the tokens worked out from the KV bytes that the engine reported; `KV | card` that
of tokens (or bytes) worked out from the card and the settings alone, and `of card` the same as a share of the card's
memory; `weights` that of the weights of a card.
"""

import argparse
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from serving.budget import Ask, as_launched, kv_bits, pool_tokens, request_bytes, work_out
from serving.cards import find_card
from serving.model import ModelShape, Split
from serving.model.families import shape_of

SAMPLES = Path(__file__).parent.parent / "tests" / "samples"
GIB = 2**30
MIB = 2**20

FP8_BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
FBGEMM = {
    "quant_method": "fbgemm_fp8",
    "modules_to_not_convert": ["lm_head", "model.layers.0", "model.layers.125", "self_attn"],
}
MODELS: Mapping[str, tuple[str, Mapping[str, Any] | None]] = {
    "Qwen/Qwen3-235B-A22B-FP8": ("qwen3-235b-a22b", FP8_BLOCKS),
    "Qwen/Qwen3-Coder-30B-A3B-Instruct-FP8": ("qwen3-coder-30b-a3b", FP8_BLOCKS),
    "Qwen/Qwen3-Coder-480B-A35B-Instruct-FP8": ("qwen3-coder-480b-a35b", FP8_BLOCKS),
    "meta-llama/Llama-3.1-8B-Instruct": ("llama-3.1-8b", None),
    "meta-llama/Meta-Llama-3.1-8B-Instruct": ("llama-3.1-8b", None),
    "meta-llama/Meta-Llama-3-8B": ("llama-3.1-8b", None),
    "moonshotai/Kimi-K2-Instruct-0905": ("kimi-k2", None),
    "moonshotai/Kimi-K2-Thinking": ("kimi-k2.5-int4", None),
    "cyankiwi/Kimi-Linear-48B-A3B-Instruct-AWQ-4bit": ("kimi-linear-48b-a3b", AWQ),
    "cyankiwi/Qwen3.5-35B-A3B-AWQ-4bit": ("qwen3.5-35b-a3b", AWQ),
    "DeepSeek-R1 (AWQ, 4 bit)": ("deepseek-v3", AWQ),
    "DeepSeek-V3 family": ("deepseek-v3", None),
    "deepseek-ai/DeepSeek-V3.2-Exp": ("deepseek-v3.2", None),
    "meta-llama/Meta-Llama-3.1-405B-Instruct-FP8": ("llama-3.1-405b", FBGEMM),
    "zai-org/GLM-5-FP8": ("glm-5", FP8_BLOCKS),
    "zai-org/GLM-4.7-FP8": ("glm-4.5", FP8_BLOCKS),
}
"""Reported name -> (sample of the configuration, quantisation that the sample lacks)."""

QWEN2_32B = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 5120,
    "intermediate_size": 27648,
    "num_hidden_layers": 64,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "vocab_size": 152064,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}
QWEN35_9B = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "text_config": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 32,
        "full_attention_interval": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 248320,
        "max_position_embeddings": 262144,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "mamba_ssm_dtype": "float32",
    },
}
"""Sizes of the linear layers are those that the reported bytes of their states have."""
WRITTEN: Mapping[str, Mapping[str, Any]] = {"Qwen/QwQ-32B": QWEN2_32B, "Qwen/Qwen3.5-9B": QWEN35_9B}
"""Shapes that no sample has."""

LLAMA = {"max_position_embeddings": 16384, "architectures": ["LlamaForCausalLM"], "model_type": "llama"}
TOTAL_MIB = {"T4": 15360, "RTX 4090 D 24GB": 24564, "B200 class": 183359, "H20": 97871}
FIRST_RELEASE = (0, 6)
"""The first vLLM whose accounting is imitated, as it is the first that Plimsoll speaks to."""
RELEASES = {("vllm", "V0"): "0.6.6", ("vllm", "V1"): "0.11.0"}


@dataclass(frozen=True)
class Outcome:
    """Errors of one report, as ratios; None where it cannot serve that test."""

    report: Mapping[str, Any]
    tokens_error: float | None = None
    card_error: float | None = None
    card_share: float | None = None
    """The same as a share of the card's memory."""
    weights_error: float | None = None
    problem: str = ""


def outcomes(*, held_out: bool) -> Iterator[Outcome]:
    """Predict every report of the half to build with, or of both."""
    reports = yaml.safe_load((SAMPLES / "startup_reports" / "reports.yaml").read_text())["reports"]
    for report in reports:
        if held_out or report["half"] == "build":
            yield judge(report)


def judge(report: Mapping[str, Any]) -> Outcome:
    """Predict one report."""
    model = shape(report)
    if model is None:
        return Outcome(report, problem="no configuration")
    ask = asked(report, model)
    said, has = report["reported"], report["has"]
    tokens = card = share = weights = None
    if "kv_tokens_from_kv_bytes" in has:
        tokens = _tokens_error(ask, said)
    if "weights" in has and said.get("weights_gib"):
        weights = model.weight_bytes(ask.split).total / (said["weights_gib"] * GIB) - 1
    old = ask.engine == "vllm" and ask.version < FIRST_RELEASE
    if "from_card" in has and ask.card_bytes > 1 and not old:
        # Started as told, and not with the batch that a budget would advise.
        found = work_out(as_launched(ask))
        held = pool_tokens(ask, found.terms.kv_cache)
        if _is_concurrency(said) or (said.get("max_concurrency") and said.get("kv_gib") is None):
            card = held / (said["max_concurrency"] * ask.context) - 1
        elif said.get("kv_tokens"):
            card = held / said["kv_tokens"] - 1
        elif said.get("kv_gib"):
            card = found.terms.kv_cache / (said["kv_gib"] * GIB) - 1
        if card is not None:
            share = (found.terms.kv_cache - found.terms.kv_cache / (1 + card)) / ask.card_bytes
    return Outcome(report, tokens, card, share, weights, "profiled in another way before 0.6" if old else "")


def _is_concurrency(said: Mapping[str, Any]) -> bool:
    return "max_concurrency_tokens" in said


def _tokens_error(ask: Ask, said: Mapping[str, Any]) -> float:
    if "kv_needed_gib" in said:
        # The engine's own arithmetic, also where it counts the layers of all stages on one card.
        per_token = said["kv_needed_gib"] * GIB / said["kv_needed_tokens"]
        expected = request_bytes(ask, said["kv_needed_tokens"])
        layers = said.get("kv_layers_counted")
        if layers:
            expected *= layers / max(len(stage) for stage in ask.model.stages(ask.split.pipeline))
        return float(expected / (per_token * said["kv_needed_tokens"]) - 1)
    pool = round((said["kv_gib"] + said.get("conv_state_gib", 0) + said.get("ssm_state_gib", 0)) * GIB)
    want = said["kv_tokens"] if not _is_concurrency(said) else said["max_concurrency"] * ask.context
    return float(pool_tokens(ask, pool) / want - 1)


def shape(report: Mapping[str, Any]) -> ModelShape | None:
    """The model of a report, where its configuration is known."""
    name = report["model"]
    if name in WRITTEN:
        return shape_of(WRITTEN[name], name=name, where=report["id"])
    known = {entry["model"]: file for file, entry in _sources().items()}
    file, quantization = MODELS.get(name, (known.get(name, "").removesuffix(".json"), None))
    if file:
        config = json.loads((SAMPLES / "configs" / f"{file}.json").read_text())
        if quantization is not None:
            config["quantization_config"] = quantization
        return shape_of(config, name=name, where=report["id"])
    written = report.get("config", {})
    if "intermediate_size" in written and "vocab_size" in written and "sliding_layers" not in written:
        return shape_of({**LLAMA, **written}, name=name, where=report["id"])
    return None


def _sources() -> Mapping[str, Mapping[str, Any]]:
    configs: Mapping[str, Mapping[str, Any]] = yaml.safe_load((SAMPLES / "configs" / "sources.yaml").read_text())[
        "configs"
    ]
    return configs


def asked(report: Mapping[str, Any], model: ModelShape) -> Ask:
    """What the report's server was started with."""
    settings, split, release = report["settings"], report["split"], report["release"]
    copies = split.get("data") or 1
    card = report["card"]
    name = str(card.get("name") or "")
    # What the framework sees as total is less than what NVML shows by what the driver keeps.
    total = round(card["total_gib"] * GIB) + 450 * MIB if card.get("total_gib") else _card_bytes(name)
    if report["id"].startswith("vllm-recipes12"):
        total = 143771 * MIB
    utilization = settings.get("gpu_memory_utilization") or settings.get("mem_fraction_static")
    cards = report["cards"] or 1
    tensor, experts = split["tensor"] or cards, cards if split["expert"] else 1
    if copies > 1 and tensor == copies:
        # Data-parallel attention: every card has the attention of its own requests, and a part of the experts.
        tensor, experts = 1, cards
    return Ask(
        model=model,
        card_bytes=total,
        card_name=name,
        engine=report["engine"],
        split=Split(tensor, split["pipeline"] or 1, experts),
        copies=copies,
        release=_release(report["engine"], release, report["date"]),
        utilization=utilization,
        kv_bits=kv_bits(settings.get("kv_cache_dtype")),
        context_tokens=min(settings.get("max_model_len") or model.context_tokens, model.context_tokens),
        token_budget=settings.get("chunked_prefill_size")
        if report["engine"] == "sglang"
        else settings.get("max_num_batched_tokens"),
        max_batch=settings.get("max_num_seqs"),
        block_tokens=settings.get("block_size"),
        graphs=not settings.get("enforce_eager"),
        prefix_cache="radix cache off" not in str(report.get("notes")),
    )


def _card_bytes(name: str) -> int:
    if name in TOTAL_MIB:
        return TOTAL_MIB[name] * MIB
    plain = name.lower()
    for word, card in (
        ("h200", "h200"),
        ("h100", "h100"),
        ("h20", "h20"),
        ("a100", "a100-80gb"),
        ("l40s", "l40s"),
        ("l4", "l4"),
        ("b200", "b200"),
        ("4090", "rtx-4090"),
        ("3090", "rtx-3090"),
    ):
        if word in plain:
            return find_card(card).memory_bytes
    return 1


def _release(engine: str, release: Mapping[str, Any], date: str | None) -> str | None:
    if engine == "sglang":
        version = str(release.get("version") or "")
        return (
            version
            if version[:2] == "0." and not version.startswith("0.0")
            else ("0.4.4" if date and date < "2025-09" else "0.5.5")
        )
    version = str(release.get("version") or "")
    if not version and date and date < "2024-09":
        return "0.4.3"
    return version or RELEASES.get((engine, release.get("api") or ""))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="the half that was kept back too")
    arguments = parser.parse_args()
    table = Table(box=None, header_style="dim", pad_edge=False)
    for column in ("report", "half", "KV tokens | KV bytes", "KV | card", "of card", "weights", ""):
        table.add_column(column, justify="left" if column in ("report", "half", "") else "right")
    judged = list(outcomes(held_out=arguments.all))
    for one in judged:
        note = one.problem or ("unusual" if one.report["unusual"] else "")
        table.add_row(
            one.report["id"],
            one.report["half"],
            *map(_percent, (one.tokens_error, one.card_error, one.card_share, one.weights_error)),
            note,
        )
    console = Console(width=150)
    console.print(table)
    for half in ("build", "held_out"):
        usual = [one for one in judged if one.report["half"] == half and not one.report["unusual"]]
        for name, errors in (
            ("KV tokens from KV bytes", [one.tokens_error for one in usual]),
            ("KV from the card", [one.card_error for one in usual]),
            ("the same as a share of the card", [one.card_share for one in usual]),
            ("weights", [one.weights_error for one in usual]),
        ):
            known = [abs(error) for error in errors if error is not None]
            if known:
                console.print(
                    f"{half}: {name}: {len(known)} reports, median {median(known):.2%}, worst {max(known):.2%}"
                )


def _percent(error: float | None) -> str:
    return "" if error is None else f"{error:+.2%}"


if __name__ == "__main__":
    main()
