"""One reader takes the facts out of start-up logs: of captures, public reports, and the simulator's three languages."""

import io
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.engines import ENGINES, TargetFacts
from serving.errors import ConfigError
from serving.log_lines import Stamp, StampKind
from serving.settings import parse_settings
from serving.simulator.dialects.base import StartFailure
from serving.simulator.shell import DIALECTS
from serving.simulator.spec import MemoryPlan, Policy, ServerSpec
from serving.startup import (
    PHASES,
    Clamp,
    DeviceBuffers,
    Outcome,
    Phase,
    RankMemory,
    StartupFacts,
    compare,
    logged_limits,
    memory_by_phase,
    place_on_clock,
    read_startup,
)

SAMPLES = Path(__file__).parent.parent / "samples"
REPORTS = SAMPLES / "logs" / "check"
GIB = 2**30


def read(text, engine=None):
    return read_startup(io.BytesIO(text.encode()), engine and ENGINES[engine])


def gib(value):
    return round(value * GIB)


def mib(value):
    return round(value * 2**20)


def taken(facts):
    return {key: fact.value for key, fact in facts.settings.items()}


# ---- captures


@pytest.mark.parametrize(
    ("log", "engine", "settings", "concurrency"),
    [
        ("vllm/startup.log", "vllm", (8, 2048, 2097152), (1024.0, 2048)),
        ("vllm/startup_notriton.log", "vllm", (8, 2048, 2097152), (1024.0, 2048)),
        ("vllm/startup_dummy.log", "vllm", (8, 2048, 2097152), (1024.0, 2048)),
        ("vllm/startup_moe_smallkv.log", "vllm", (8, 1024, 1088), (1.06, 1024)),
        ("vllm/engine_dead.log", "vllm", (8, 2048, 2097152), (1024.0, 2048)),
        ("vllm/small_moe/startup_batch_slots.log", "vllm", (8, 2048, 131072), (64.0, 2048)),
        ("vllm/small_moe/startup_kv_cache.log", "vllm", (8, 1024, 1088), (1.06, 1024)),
        ("llamacpp/startup.log", "llamacpp", (8, 2048, 16384), None),
        ("llamacpp/startup_b10434.log", "llamacpp", (8, 2048, 16384), None),
        ("llamacpp/b11434/startup.log", "llamacpp", (8, 2048, 16384), None),
        ("llamacpp/log_kv_full.log", "llamacpp", (8, 1024, 1024), None),
        ("llamacpp/log_small_load.log", "llamacpp", (4, 2048, 8192), None),
        ("llamacpp/log_small_load2.log", "llamacpp", (4, 2048, 8192), None),
        ("llamacpp/log_tiny-moe.log", "llamacpp", (8, 2048, 16384), None),
        ("llamacpp/log_tiny-q3moe.log", "llamacpp", (8, 2048, 16384), None),
    ],
)
def test_a_captured_start_tells_its_limits_and_that_it_became_ready(log, engine, settings, concurrency):
    facts = read_startup(SAMPLES / log)
    assert (facts.engine, facts.also, facts.starts, facts.ready) == (engine, (), 1, True)
    keys = ("max_batch_size", "max_model_len", "kv_cache_capacity_tokens")
    assert tuple(facts.number(key) for key in keys) == settings
    told = None if facts.max_concurrency is None else (facts.max_concurrency, facts.max_concurrency_tokens)
    assert told == concurrency
    assert facts.clamps == ()
    seconds = [phase.stamp.seconds for phase in facts.phases]
    assert seconds == sorted(seconds)
    assert [phase.name for phase in facts.phases if phase.name in ("launch", "weights", "ready")] == [
        "launch", "weights", "ready",
    ]  # fmt: skip


def test_a_captured_vllm_tells_what_it_was_started_with():
    facts = read_startup(SAMPLES / "vllm" / "startup.log")
    assert facts.version == "0.32.0"
    assert facts.served_as == "tiny"
    assert (
        taken(facts).items()
        >= {
            "model": "models/tiny-hf",
            "dtype": "torch.bfloat16",
            "quantization": "none",
            "kv_cache_dtype": "auto",
            "tensor_parallel_size": 1,
            "pipeline_parallel_size": 1,
            "data_parallel_size": 1,
            "enable_prefix_cache": True,
        }.items()
    )
    assert facts.settings["max_batch_size"].line == 8
    assert facts.settings["max_batch_size"].text == "non-default args: ... 'max_num_seqs': 8 ..."
    assert [phase.name for phase in facts.phases] == ["launch", "weights", "kv_pool", "warmup", "ready"]
    assert facts.ranks == (RankMemory("", kv_cache_bytes=GIB, kv_tokens=2097152),)


def test_a_server_that_is_no_engine_of_ours_has_no_start():
    facts = read_startup(SAMPLES / "transformers" / "startup.log")
    assert (facts.engine, facts.starts, facts.settings, facts.phases) == (None, 0, {}, ())
    assert facts.log_bytes > 0


# ---- public reports


REPORTED = {
    "vllm_0.7_v1_blocks": {
        "settings": {"kv_cache_capacity_tokens": 1381 * 16, "max_model_len": 2048},
        "ranks": (RankMemory("", weights_bytes=gib(67.7229), kv_blocks=1381),),
        "max_concurrency": 10.79,
    },
    # Blocks alone tell no tokens: the size of a block is not in the log.
    "vllm_0.8_v0_profile": {
        "settings": {"gpu_memory_utilization": 0.9},
        "ranks": (
            RankMemory(
                "",
                weights_bytes=gib(12.55),
                kv_cache_bytes=gib(56.18),
                activations_bytes=gib(2.38),
                non_torch_bytes=gib(0.16),
                kv_blocks=7191,
            ),
        ),
    },
    "vllm_0.9_v0_graphs": {
        "settings": {
            "gpu_memory_utilization": 0.8,
            "kv_cache_capacity_tokens": 36184 * 16,
            "max_model_len": 8192,
        },
        "ranks": (
            RankMemory(
                "",
                weights_bytes=gib(1.12),
                kv_cache_bytes=gib(61.84),
                graphs_bytes=gib(0.13),
                activations_bytes=gib(0.23),
                non_torch_bytes=gib(0.16),
                kv_blocks=36184,
            ),
        ),
        "phases": ["kv_pool", "graphs", "warmup"],
    },
    "vllm_0.6_v0_profile_lines": {
        "settings": {"gpu_memory_utilization": 0.9},
        "ranks": (
            RankMemory(
                "",
                weights_bytes=gib(14.96),
                kv_cache_bytes=gib(53.29),
                activations_bytes=gib(1.26),
                non_torch_bytes=gib(1.79),
            ),
        ),
    },
    "vllm_0.6.4_v0_profile_line": {
        "settings": {"gpu_memory_utilization": 0.9, "kv_cache_capacity_tokens": 31232, "max_model_len": 20000},
        "ranks": (
            RankMemory(
                "", weights_bytes=gib(14.9888), kv_cache_bytes=gib(3.81), non_torch_bytes=gib(0.35), kv_blocks=1952
            ),
        ),
        "phases": ["profile", "kv_pool"],
    },
    "vllm_0.8_v0_two_of_sixteen_workers": {
        "settings": {"gpu_memory_utilization": 0.99},
        "ranks": tuple(
            RankMemory(
                f"VllmWorkerProcess {pid}",
                weights_bytes=gib(21.21),
                kv_cache_bytes=gib(1.57),
                activations_bytes=gib(0.37),
                non_torch_bytes=gib(0.20),
            )
            for pid in (507, 521)
        ),
    },
    # The tokens printed count one of several groups of layers; concurrency x length is what it holds.
    "vllm_0.11_hybrid_tp2": {
        "settings": {"kv_cache_capacity_tokens": 297600, "max_model_len": 120000},
        "ranks": (RankMemory("dp0", kv_tokens=75840), RankMemory("tp0", kv_cache_bytes=gib(2.30))),
        "max_concurrency": 2.48,
        "hybrid": True,
    },
    "vllm_2026_hybrid_fp4_cache": {
        "settings": {"kv_cache_capacity_tokens": 1823372, "max_model_len": 1048576},
        "max_concurrency": 1.74,
        "hybrid": True,
    },
    "vllm_2026_graph_pool": {
        "settings": {"kv_cache_capacity_tokens": 396928, "max_model_len": 131072},
        "ranks": (RankMemory("", graphs_bytes=gib(0.11), kv_tokens=396928),),
        "phases": ["kv_pool", "graphs", "warmup"],
    },
    "vllm_2026_weights_of_a_rank": {"settings": {}, "ranks": (RankMemory("tp0", weights_bytes=gib(12.66)),)},
    "sglang_0.5.19_capped_by_state": {
        "settings": {
            "model": "Jackrong/Qwopus3.6-27B-v2-FP8",
            "tensor_parallel_size": 1,
            "data_parallel_size": 1,
            "gpu_memory_utilization": 0.85,
            "max_batch_size": 9,
        },
        "clamps": [("max_batch_size", 32, 9, 2)],
    },
    "sglang_2026_cut_without_a_word": {
        "settings": {
            "tensor_parallel_size": 2,
            "data_parallel_size": 1,
            "max_num_batched_tokens": 2048,
            "max_batch_size": 6,
            "max_model_len": 262144,
            "kv_cache_capacity_tokens": 206635,
        },
        "asked": {"max_batch_size": 8, "max_model_len": 262144},
    },
    "sglang_2026_sizes": {
        "settings": {
            "max_num_batched_tokens": 8192,
            "max_batch_size": 33,
            "max_model_len": 256000,
            "kv_cache_capacity_tokens": 2086558,
        },
    },
    "sglang_2026_reduced": {
        "settings": {
            "max_num_batched_tokens": 8192,
            "max_batch_size": 50,
            "max_model_len": 32768,
            "kv_cache_capacity_tokens": 1956160,
        },
        "clamps": [("max_batch_size", 128, 50, 1)],
    },
    "sglang_2025_pools": {
        "settings": {},
        "ranks": tuple(RankMemory(rank, kv_cache_bytes=gib(16.46)) for rank in ("tp0", "tp1")),
    },
    "llamacpp_2026_hybrid_rocm": {
        "settings": {
            "max_num_batched_tokens": 2048,
            "physical_batch_tokens": 2048,
            "kv_unified": True,
            "kv_cache_dtype": "f16",
            "kv_cache_dtype_k": "f16",
            "kv_cache_dtype_v": "f16",
            "max_batch_size": 4,
            "kv_cache_capacity_tokens": 32768,
        },
        "asked": {"max_batch_size": 4, "max_model_len": 32768},
        "buffers": (
            DeviceBuffers("ROCm_Host", compute_bytes=mib(288.05), output_bytes=mib(2.32)),
            DeviceBuffers("ROCm0", kv_cache_bytes=mib(768), state_bytes=mib(301.5), compute_bytes=mib(1219)),
        ),
        "hybrid": True,
        "phases": ["kv_pool", "workspace", "warmup"],
    },
    "llamacpp_2026_capped_per_slot": {
        "settings": {"max_model_len": 4096},
        "clamps": [("max_model_len", 16384, 4096, 2)],
    },
    "llamacpp_2024_two_cards": {
        "settings": {
            "max_num_batched_tokens": 2048,
            "physical_batch_tokens": 512,
            "kv_cache_dtype": "f16",
            "kv_cache_dtype_k": "f16",
            "kv_cache_dtype_v": "f16",
            "gpu_layers": 41,
            "kv_cache_capacity_tokens": 4096,
        },
        "buffers": (
            DeviceBuffers("CPU", model_bytes=mib(1640.62)),
            DeviceBuffers("CUDA0", model_bytes=mib(5434.38), kv_cache_bytes=mib(1536), compute_bytes=mib(672.01)),
            DeviceBuffers("CUDA1", model_bytes=mib(13989.53), kv_cache_bytes=mib(3584)),
            DeviceBuffers("CUDA_Host", output_bytes=mib(1.95)),
        ),
    },
    "llamacpp_2026_router_draft": {"settings": {"max_batch_size": 2, "max_model_len": 262144}},
    "llamacpp_2025_fit_reduced": {
        "settings": {"kv_cache_capacity_tokens": 4096},
        "clamps": [("kv_cache_capacity_tokens", 65536, 4096, 2)],
    },
}


def test_every_report_is_held_by_a_test():
    assert {path.stem for path in REPORTS.glob("*.log")} == set(REPORTED)
    listed = (REPORTS / "README.md").read_text()
    assert [name for name in REPORTED if f"`{name}.log`" not in listed] == []


@pytest.mark.parametrize("name", REPORTED)
def test_a_public_report_gives_the_right_facts(name):
    wanted = REPORTED[name]
    facts = read_startup(REPORTS / f"{name}.log")
    assert facts.engine == name.split("_", maxsplit=1)[0]
    assert (facts.also, facts.starts, facts.ready) == ((), 1, False)
    assert taken(facts) == wanted["settings"]
    assert [(clamp.key, clamp.asked, clamp.taken, clamp.line) for clamp in facts.clamps] == wanted.get("clamps", [])
    assert facts.hybrid is wanted.get("hybrid", False)
    for field in ("ranks", "buffers", "max_concurrency"):
        if field in wanted:
            assert getattr(facts, field) == wanted[field]
    if "asked" in wanted:
        assert {key: fact.value for key, fact in facts.asked.items()} == wanted["asked"]
    if "phases" in wanted:
        assert [phase.name for phase in facts.phases] == wanted["phases"]
    lines = (REPORTS / f"{name}.log").read_text().split("\n")
    for fact in facts.settings.values():
        assert fact.text.split(" ... ")[0].removeprefix("... ")[:40] in lines[fact.line - 1]


def test_seconds_that_a_line_tells_say_when_the_graphs_began():
    facts = read_startup(REPORTS / "vllm_0.9_v0_graphs.log")
    began = {phase.name: phase.stamp.seconds for phase in facts.phases}
    assert began["warmup"] - began["graphs"] == 2.0


# ---- the simulator, in three languages


class Instant:
    def step_ns(self, step):
        del step
        return 1

    overhead_ns = 1


T_NS = 1_795_966_874_000_000_000
RELEASES = [(engine, release) for engine, dialect in DIALECTS.items() for release in dialect.releases]


def spec(engine, release, **changes):
    block = {"vllm": 16}.get(engine, 1)
    values = {
        "engine": engine,
        "release": release,
        "model": "tiny",
        "max_batch": 8,
        "context_tokens": 2048,
        "token_budget": 2048,
        "block_tokens": block,
        "kv_blocks": 16384 // block,
        "cost": Instant(),
        "memory": MemoryPlan(
            cards=1,
            card_total_bytes=80 * GIB,
            weights_bytes=14 * GIB,
            kv_cache_bytes=40 * GIB,
            workspace_bytes=4 * GIB,
        ),
        "policy": Policy(partitioned=engine == "llamacpp", counts_at_finish=True),
        "settings": {"verbosity": 4, "n_ctx_train": 4096} if engine == "llamacpp" else {},
    }
    return ServerSpec(**{**values, **changes})


def start(of, failure=None):
    return "\n".join(line.text for line in DIALECTS[of.engine].startup_log(of, T_NS, failure)) + "\n"


@pytest.mark.parametrize(("engine", "release"), RELEASES)
def test_a_simulated_start_is_recognised_and_read(engine, release):
    facts = read(start(spec(engine, release)))
    assert (facts.engine, facts.also, facts.starts, facts.ready) == (engine, (), 1, True)
    assert facts.number("max_batch_size") == 8
    assert facts.number("max_model_len") == 2048
    assert facts.number("kv_cache_capacity_tokens") == 16384
    assert facts.clamps == ()
    assert [phase.name for phase in facts.phases if phase.name in ("weights", "ready")] == ["weights", "ready"]


@pytest.mark.parametrize(
    ("engine", "release"), [(engine, release) for engine, release in RELEASES if engine != "llamacpp"]
)
def test_a_simulated_start_says_where_memory_went(engine, release):
    (rank,) = read(start(spec(engine, release))).ranks
    assert rank.weights_bytes == 14 * GIB
    assert rank.kv_cache_bytes in (40 * GIB, None)
    assert rank.graphs_bytes == GIB


@pytest.mark.parametrize("release", DIALECTS["llamacpp"].releases)
def test_a_simulated_llamacpp_names_the_buffers_of_each_device(release):
    memory = MemoryPlan(cards=2, weights_bytes=40 * GIB, kv_cache_bytes=8 * GIB, workspace_bytes=GIB)
    facts = read(start(spec("llamacpp", release, memory=memory)))
    cards = [buffers for buffers in facts.buffers if not buffers.on_host]
    assert [card.device for card in cards] == ["CUDA0", "CUDA1"]
    assert {(card.model_bytes, card.kv_cache_bytes, card.compute_bytes) for card in cards} == {(40 * GIB, 8 * GIB, GIB)}
    assert facts.offloaded_layers == facts.layers


CLAMPED = [
    ("vllm", {"settings": {"max_model_len": 4096}}, Clamp("max_model_len", 4096, 2048, 0, "")),
    ("sglang", {"asked_max_batch": 64}, Clamp("max_batch_size", 64, 8, 0, "")),
    (
        "llamacpp",
        {"settings": {"n_ctx": 8 * 4096, "n_ctx_train": 2048, "verbosity": 4}},
        Clamp("max_model_len", 4096, 2048, 0, ""),
    ),
]


@pytest.mark.parametrize(
    ("engine", "release", "changes", "clamp"),
    [
        (engine, release, changes, clamp)
        for engine, changes, clamp in CLAMPED
        for release in DIALECTS[engine].releases
        if release != "b5170"  # which capped without a word
    ],
)
def test_a_simulated_clamp_is_found_with_its_line(engine, release, changes, clamp):
    text = start(spec(engine, release, **changes))
    facts = read(text)
    (found,) = facts.clamps
    assert replace(found, line=0, text="") == clamp
    assert found.text in text.split("\n")[found.line - 1]
    assert facts.number(clamp.key) == clamp.taken


@pytest.mark.parametrize(("engine", "release"), RELEASES)
@pytest.mark.parametrize("failure", list(StartFailure))
def test_a_failed_start_never_became_ready_and_the_next_one_counts(engine, release, failure):
    of = spec(engine, release)
    failed = read(start(of, failure))
    assert (failed.engine, failed.starts, failed.ready) == (engine, 1, False)
    again = read(start(of, failure) + start(replace(of, max_batch=5)))
    assert (again.starts, again.ready) == (2, True)
    assert again.number("max_batch_size") == 5


@pytest.mark.parametrize(("engine", "release"), RELEASES)
def test_restarts_in_one_file_are_counted_and_the_last_is_told(engine, release):
    first, second = spec(engine, release, max_batch=3), spec(engine, release, max_batch=5)
    served = 'INFO:     10.0.0.7:4711 - "POST /v1/chat/completions HTTP/1.1" 200 OK\n' * 50
    text = start(first) + served + start(second) + served + start(first)
    facts = read(text)
    assert (facts.starts, facts.ready, facts.number("max_batch_size")) == (3, True, 3)
    assert facts.first_line > (start(first) + served + start(second)).count("\n")


@pytest.mark.parametrize(("engine", "release"), RELEASES)
def test_colours_containers_and_progress_bars_change_nothing(engine, release):
    text = start(spec(engine, release))
    plain = read(text)
    dressed = "".join(f"\x1b[36mserver-1  | \x1b[0m10%|#\r20%|##\r{line}\n" for line in text.splitlines())
    seen = read(dressed)
    assert taken(seen) == taken(plain)
    assert [phase.name for phase in seen.phases] == [phase.name for phase in plain.phases]


def test_two_engines_in_one_log_are_said_and_either_can_be_read():
    both = start(spec("vllm", "0.33.0")) + start(spec("sglang", "0.5.23", max_batch=24))
    facts = read(both)
    assert {facts.engine, *facts.also} == {"vllm", "sglang"}
    assert read(both, "vllm").number("max_batch_size") == 8
    assert read(both, "sglang").number("max_batch_size") == 24


def test_a_log_of_another_engine_has_no_start_of_this_one():
    facts = read(start(spec("vllm", "0.33.0")), "llamacpp")
    assert (facts.engine, facts.starts) == (None, 0)


@pytest.mark.parametrize("release", DIALECTS["sglang"].releases)
def test_figures_of_one_replica_are_multiplied(release):
    of = spec(
        "sglang",
        release,
        max_batch=24,
        card_parallel=4,
        memory=replace(spec("sglang", release).memory, cards=4),
        settings={"dp_size": 2, "tp_size": 4, "enable_dp_attention": True},
    )
    facts = read(start(of))
    assert facts.number("max_batch_size") == 24
    assert facts.number("kv_cache_capacity_tokens") == 16384
    assert "x 2 data-parallel replicas" in facts.settings["max_batch_size"].text


@pytest.mark.parametrize("release", ["0.8.5", "0.33.0"])
def test_ranks_are_told_apart(release):
    facts = read(start(spec("vllm", release, card_parallel=4, memory=replace(spec("vllm", release).memory, cards=4))))
    names = [rank.rank for rank in facts.ranks if rank.weights_bytes]
    assert names
    assert set(names) <= {f"{kind}{number}" for kind in ("rank", "tp") for number in range(4)}
    assert facts.number("tensor_parallel_size") == 4


# ---- single lines


def test_engines_of_several_data_parallel_ranks_are_one_start():
    lines = []
    for rank in range(2):
        who = f"(EngineCore_DP{rank} pid=1{rank})"
        config = "model='m', tensor_parallel_size=2, data_parallel_size=2"
        lines += [
            f"{who} INFO 11-29 15:40:0{rank} [core.py:1] Initializing a V1 LLM engine (v0.12.0) with config: {config}",
            f"(Worker_DP{rank}_TP0_EP{rank * 2} pid=2{rank}) INFO 11-29 15:40:10 [a.py:1] Starting to load model m...",
        ]
    for rank, tokens in ((0, "9,000"), (1, "8,000")):
        lines += [
            f"(EngineCore_DP{rank} pid=1{rank}) INFO 11-29 15:41:00 [kv.py:1] GPU KV cache size: {tokens} tokens",
        ]
    facts = read("\n".join(lines))
    assert (facts.starts, facts.replicas) == (1, 2)
    assert facts.number("kv_cache_capacity_tokens") == 16000
    assert facts.binding_rank == RankMemory("dp1", kv_tokens=8000)


def test_a_replica_that_serves_alone_is_the_whole_target():
    line = "non-default args: {'model': 'm', 'data_parallel_size': 4, 'data_parallel_rank': 2, 'max_num_seqs': 8}\n"
    facts = read(line)
    assert (facts.replicas, facts.number("max_batch_size")) == (1, 8)
    assert read(line.replace("'data_parallel_rank': 2, ", "")).number("max_batch_size") == 32
    assert "one_replica" not in facts.settings


def test_the_smallest_pipeline_stage_binds():
    facts = read("GPU KV cache size: 900 tokens\nGPU KV cache size: 800 tokens\n", "vllm")
    assert facts.number("kv_cache_capacity_tokens") == 800


def test_a_restarted_process_is_another_start_though_the_first_never_got_further():
    banner = "(APIServer pid={}) INFO 11-29 15:40:14 [a.py:1] non-default args: {{'model': 'm', 'max_num_seqs': {}}}\n"
    facts = read(banner.format(1, 4) + "Traceback\n" + banner.format(2, 6))
    assert (facts.starts, facts.number("max_batch_size")) == (2, 6)


def test_what_is_only_the_default_is_not_told():
    facts = read(start(spec("vllm", "0.33.0", max_batch=256)))
    assert "max_batch_size" not in facts.settings


@pytest.mark.parametrize(
    "line",
    [
        "non-default args: {'api_key': ['hunter2'], 'max_num_seqs': 8, 'hf_token': 'hunter2'}",
        "args: Namespace(host=None, api_key='hunter2', max_num_seqs=8, hf_token='hunter2')",
        "server_args=ServerArgs(model_path='m', api_key='hunter2', max_running_requests=8, tp_size=1)",
        "Using max model len 2048 with api_key=hunter2",
    ],
)
def test_no_key_of_a_line_of_arguments_is_kept(line):
    facts = read(f"INFO 11-29 15:40:14 [a.py:1] {line}\n")
    assert facts.starts == 1
    assert "hunter2" not in repr(facts)


@pytest.mark.parametrize(
    ("line", "key", "asked", "value"),
    [
        ("vllm: Auto-fit max_model_len: reduced from 262144 to 34736 to fit in", "max_model_len", 262144, 34736),
        (
            "vllm: Disabling sliding window and capping the max length to the sliding window size (4096).",
            "max_model_len", None, 4096,
        ),
        (
            "sglang: max_running_requests was reduced from the requested 64 to 24 (per dp worker) due to",
            "max_batch_size", 64, 24,
        ),
        ("sglang: max_running_requests is capped to 9 by the mamba state cache", "max_batch_size", None, 9),
        (
            "sglang: max_total_tokens=90000 is larger than the profiled value 70000. Use the profiled value instead.",
            "kv_cache_capacity_tokens", 90000, 70000,
        ),
        (
            "sglang: DP attention is enabled. The chunked prefill size is adjusted to 4096 to avoid MoE kernel issues.",
            "max_num_batched_tokens", None, 4096,
        ),
        (
            "llamacpp: srv load_model: the slot context (80128) exceeds the training context of the model (32768) - capping",
            "max_model_len", 80128, 32768,
        ),
        (
            "llamacpp: srv load_model: capping per-slot context (1024) to --kv-unified-per-slot (500)",
            "max_model_len", 1024, 500,
        ),
        (
            "llamacpp: common_params_fit_impl: context size reduced from 262144 to 40960 -> need 9 MiB less memory in total",
            "kv_cache_capacity_tokens", 262144, 40960,
        ),
        (
            "llamacpp: llama_context: n_ctx is not divisible by n_seq_max - rounding down to 40704",
            "kv_cache_capacity_tokens", None, 40704,
        ),
    ],
)  # fmt: skip
def test_every_clamp_is_found_once_however_often_ranks_repeat_it(line, key, asked, value):
    engine, _, words = line.partition(": ")
    facts = read(f"{words}\n" * 4, engine)
    assert [(clamp.key, clamp.asked, clamp.taken, clamp.line) for clamp in facts.clamps] == [(key, asked, value, 1)]
    assert facts.number(key) == value


@pytest.mark.parametrize("engine", ENGINES)
@given(data=st.binary(max_size=300))
def test_any_bytes_can_be_read(engine, data):
    assert read_startup(io.BytesIO(b" " + data), ENGINES[engine]).log_bytes == len(data) + 1


@pytest.mark.parametrize("engine", ENGINES)
@given(rule=st.data(), numbers=st.text("0123456789.,-", max_size=40))
def test_absurd_figures_are_no_figures(engine, rule, numbers):
    lines = {
        "vllm": ["GPU KV cache size: {} tokens", "Maximum concurrency for {} tokens per request: {}x", "# GPU blocks: {}",
                 "Available KV cache memory: {} GiB", "Auto-fit max_model_len: reduced from {} to {} to fit"],
        "sglang": ["max_total_num_tokens={}, max_running_requests={}, context_len={}", "K size: {} GB, V size: {} GB"],
        "llamacpp": ["n_slots = {}, n_ctx_slot = {}, kv_unified = 'false'", "CPU KV buffer size = {} MiB"],
    }[engine]  # fmt: skip
    line = rule.draw(st.sampled_from(lines))
    facts = read(line.replace("{}", numbers), engine)
    assert all(number >= 0 for number in logged_limits(ENGINES[engine], line.replace("{}", numbers)).values())
    assert facts.log_bytes >= len(line.replace("{}", numbers))
    assert logged_limits(ENGINES[engine], line.replace("{}", "9" * 5000)) == {}


def test_a_log_of_months_is_not_read_line_by_line(tmp_path):
    log = tmp_path / "a.log"
    line = b'(APIServer pid=1) INFO:     10.0.0.7:4711 - "POST /v1/chat/completions HTTP/1.1" 200 OK\n'
    with log.open("wb") as file:
        file.write((SAMPLES / "vllm" / "startup.log").read_bytes())
        for _ in range(20):
            file.write(line * 11_000)
        file.write((SAMPLES / "vllm" / "startup.log").read_bytes().replace(b"pid=533", b"pid=999"))
    facts = read_startup(log)
    assert (facts.starts, facts.ready, facts.number("max_batch_size")) == (2, True, 8)
    assert facts.first_line > 220_000


def test_what_is_no_log_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="directory"):
        read_startup(tmp_path)


# ---- memory by phase


def phases(*starts, kind=StampKind.ZONED):
    return tuple(Phase(name, number, Stamp(at, kind)) for number, (name, at) in enumerate(starts, 1))


def test_memory_rises_in_the_phase_in_which_it_was_taken():
    begun = phases(("launch", 0.0), ("weights", 10.0), ("kv_pool", 20.0), ("ready", 30.0))
    samples = [(0.0, 1.0), (9.0, 1.0), (15.0, 8.0), (19.5, 15.0), (25.0, 60.0), (28.0, 55.0), (40.0, 99.0)]
    moved = memory_by_phase(samples, begun)
    assert [(one.phase, one.rise_bytes, one.peak_bytes, one.seconds) for one in moved] == [
        ("launch", 0.0, 1.0, 10.0),
        ("weights", 14.0, 15.0, 10.0),
        ("kv_pool", 40.0, 60.0, 10.0),
    ]


def test_a_phase_without_a_sample_tells_nothing():
    moved = memory_by_phase([(12.0, 5.0)], phases(("launch", 0.0), ("weights", 10.0), ("ready", 20.0)))
    assert [(one.before_bytes, one.after_bytes, one.rise_bytes) for one in moved] == [
        (None, None, None),
        (None, 5.0, None),
    ]
    assert memory_by_phase([], ()) == ()


@given(st.lists(st.floats(0, 1e12), min_size=2, max_size=30))
def test_the_rises_add_up_to_the_whole_rise(values):
    samples = [(float(second), value) for second, value in enumerate(values)]
    last = samples[-1][0]
    begun = phases(*((name, last * part / 6) for part, name in enumerate(PHASES[:7])))
    rises = [one.rise_bytes for one in memory_by_phase(samples, begun)]
    known = [rise for rise in rises if rise is not None]
    if len(known) == len(rises):
        assert sum(known) == pytest.approx(values[-1] - values[0], abs=1.0)


NOVEMBER_29 = 1795966814.0  # 2026-11-29 15:40:14 UTC
AS_PRINTED = 28827614.0  # the same, in the seconds of a leap year


@pytest.mark.parametrize("zone", [0.0, 3600.0, -28800.0])
def test_a_log_without_year_or_zone_is_placed_by_what_was_sampled(zone):
    begun = phases(("weights", AS_PRINTED + zone), ("ready", AS_PRINTED + zone + 30), kind=StampKind.YEARLESS)
    placed = place_on_clock(begun, NOVEMBER_29 - 60, NOVEMBER_29 + 60, (zone, 0.0))
    assert [phase.stamp.seconds for phase in placed] == [NOVEMBER_29, NOVEMBER_29 + 30]


def test_times_that_fit_no_moment_or_several_are_not_placed():
    begun = phases(("weights", AS_PRINTED), ("ready", AS_PRINTED + 30), kind=StampKind.YEARLESS)
    assert place_on_clock(begun, NOVEMBER_29 - 9e5, NOVEMBER_29 - 8e5) is None
    assert place_on_clock(begun, NOVEMBER_29 - 90_000, NOVEMBER_29 + 90_000, (0.0, 3600.0)) is None
    assert place_on_clock(phases(("ready", 1.0), kind=StampKind.RELATIVE), 0.0, 9e9) is None
    assert place_on_clock((), 0.0, 9e9) is None


# ---- against the file


def check(text, facts, live=None):
    return {check.key: check for check in compare(parse_settings(text.encode(), "a.yaml"), facts, live)}


def outcomes(checks):
    return {key: str(one.outcome) for key, one in checks.items()}


def test_each_field_is_equal_differs_was_clamped_or_is_not_told():
    text = start(spec("vllm", "0.33.0", settings={"max_model_len": 4096}))
    checks = check(
        "engine: vllm\nmodel: /elsewhere/tiny\nmax_num_seqs: 16\nmax_model_len: 4096\nswap_space: 4\n"
        "tensor_parallel_size: 1\nkv_cache_dtype: bf16\ngpus: 1\n",
        read(text),
    )
    assert outcomes(checks) == {
        "engine": "equal", "model": "equal", "max_batch_size": "differs", "max_model_len": "clamped",
        "swap_space_gb": "absent", "tensor_parallel_size": "equal", "kv_cache_dtype": "equal", "gpus": "equal",
    }  # fmt: skip
    clamped = checks["max_model_len"]
    assert (clamped.expected, clamped.actual, clamped.expected_line) == (4096, 2048, 4)
    assert "Auto-fit max_model_len: reduced from 4096 to 2048" in clamped.text
    assert "Auto-fit" in text.split("\n")[clamped.line - 1]
    assert checks["max_batch_size"].actual == 8


def test_a_cut_without_a_word_is_a_clamp_where_the_server_was_started_with_the_file():
    facts = read_startup(REPORTS / "sglang_2026_cut_without_a_word.log")
    checks = check("max_running_requests: 8\n", facts)
    assert (checks["max_batch_size"].outcome, checks["max_batch_size"].actual) == (Outcome.CLAMPED, 6)
    checks = check("max_running_requests: 12\n", facts)
    assert checks["max_batch_size"].outcome is Outcome.DIFFERS


def test_a_file_that_says_what_a_clamp_left_is_equal_and_says_so():
    facts = read_startup(REPORTS / "sglang_0.5.19_capped_by_state.log")
    (one,) = [one for one in check("max_batch_size: 9\n", facts).values() if one.key == "max_batch_size"]
    assert (one.outcome, one.note) == (Outcome.EQUAL, "cut down by the server from 32")


def test_a_clamp_of_what_the_file_does_not_say_is_told():
    facts = read_startup(REPORTS / "llamacpp_2026_capped_per_slot.log")
    checks = check("engine: llamacpp\n", facts)
    assert checks["max_model_len"].outcome is Outcome.CLAMPED
    assert checks["max_model_len"].expected_line is None


def test_silence_is_explained_and_never_filled_with_a_default():
    checks = check("max_batch_size: 256\n", read(start(spec("vllm", "0.33.0", max_batch=256))))
    assert checks["max_batch_size"].outcome is Outcome.ABSENT
    assert checks["max_batch_size"].actual is None
    assert "max_num_seqs" in checks["max_batch_size"].note


def test_the_live_server_counts_where_the_log_is_silent_and_contradicts_where_it_is_not():
    live = TargetFacts("vllm", "0.33.0", "tiny", context_tokens=2048, max_running_requests=8, max_running_source="/x")
    alone = check("max_batch_size: 8\nmax_model_len: 4096\n", StartupFacts(), live)
    assert outcomes(alone) == {"max_batch_size": "equal", "max_model_len": "differs"}
    assert alone["max_batch_size"].text == "live: /x"
    both = check("max_batch_size: 8\n", read(start(spec("vllm", "0.33.0"))), replace(live, max_running_requests=4))
    assert both["max_batch_size"].outcome is Outcome.DIFFERS
    assert "does not run from this start" in both["max_batch_size"].note


@pytest.mark.parametrize(
    ("key", "said", "text", "same"),
    [
        ("kv_cache_dtype", "fp8", "torch.float8_e4m3fn", True),
        ("kv_cache_dtype", "fp8_e5m2", "torch.float8_e4m3fn", False),
        ("kv_cache_dtype", "auto", "torch.bfloat16", False),
        ("kv_cache_dtype", "bfloat16", "torch.bfloat16", True),
    ],
)
def test_element_types_have_several_names(key, said, text, same):
    facts = read(f"[2026-11-29 10:00:00 TP0] KV Cache is allocated. dtype: {text}, #tokens: 9, KV size: 1.00 GB\n")
    checks = check(f"{key}: {said}\n", facts)
    assert (checks[key].outcome is Outcome.EQUAL) is (same or said == "auto")


@pytest.mark.parametrize(("said", "same"), [("all", True), ("99", True), ("41", True), ("40", False), ("auto", True)])
def test_layers_on_the_cards_are_compared_by_what_there_are(said, same):
    facts = read_startup(REPORTS / "llamacpp_2024_two_cards.log")
    checks = check(f"gpu_layers: {said}\ngpus: 2\n", facts)
    assert (checks["gpu_layers"].outcome is Outcome.EQUAL) is same
    assert checks["gpus"].outcome is Outcome.EQUAL
