"""A launch gives what the engine would give: pools as reported, clamps as logged, and failures with their numbers."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.budget import DRIVER_BYTES, Ask, card_terms, most_requests, work_out
from serving.cards import CARDS, Card, Host, find_card
from serving.errors import ConfigError
from serving.model import ModelShape, Split, read_model
from serving.model.families import shape_of
from serving.settings import Settings
from serving.simulator.dialects.base import StartFailure
from serving.simulator.launch import LaunchFailure, launch
from serving.simulator.spec import OnFull, ServerSpec, Work

GIB = 2**30
CONFIGS = Path(__file__).parents[2] / "samples" / "configs"
H100_NVL = Card("NVIDIA H100 NVL", (), 95830 * 2**20, 3.9e12, 835e12, 1671e12, 300e9)
RTX_6000_ADA = Card("NVIDIA RTX 6000 Ada Generation", (), 49140 * 2**20, 0.96e12, 364e12, 728e12, 32e9)
QWEN3 = {
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
}


def qwen3(name, layers, hidden, intermediate, **others) -> ModelShape:
    values = {"num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": intermediate} | others
    return shape_of(QWEN3 | values, name=name, where="a test")


QWEN3_8B = qwen3("qwen3-8b", 36, 4096, 12288)
QWEN3_14B = qwen3("qwen3-14b", 40, 5120, 17408, num_attention_heads=40)
QWEN3_32B = qwen3("qwen3-32b", 64, 5120, 25600, num_attention_heads=64)
QWEN3_235B = qwen3(
    "qwen3-235b",
    94,
    4096,
    12288,
    model_type="qwen3_moe",
    num_attention_heads=64,
    num_key_value_heads=4,
    num_experts=128,
    num_experts_per_tok=8,
    moe_intermediate_size=1536,
).with_bits(8)


def settings(**values) -> Settings:
    return Settings("serving.yaml", {key: line for line, key in enumerate(values, 1)}, **values)


def failure(*args, **options) -> LaunchFailure:
    with pytest.raises(LaunchFailure) as caught:
        launch(*args, **options)
    return caught.value


def planned_bytes(spec: ServerSpec) -> int:
    memory = spec.memory
    return (
        memory.weights_bytes
        + memory.kv_cache_bytes
        + memory.workspace_bytes
        + memory.activation_bytes_per_token * spec.token_budget
        + memory.gpu_bytes_per_request * spec.max_batch
    )


# ---- the three machines


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize(("bits", "weights_gib"), [(16, 69), (8, 34.6)])
def test_hy3_fits_8_h200_in_both_widths(engine, bits, weights_gib):
    spec = launch(engine, model="hy3", card="h200", cards=8, weight_bits=bits)
    assert spec.memory.cards == spec.card_parallel == 8
    assert spec.memory.card_name == "NVIDIA H200"
    assert spec.memory.weights_bytes / GIB == pytest.approx(weights_gib, rel=0.01)
    assert spec.kv_capacity_tokens > 48 * 16_384
    assert spec.context_tokens == 262_144


def test_hy3_does_not_fit_8_h100_in_16_bits_and_does_in_8():
    told = failure("vllm", model="hy3", card="h100", cards=8)
    assert told.failure is StartFailure.NO_KV_CACHE, "weights take 68.8 of the 72.9 GiB, and a step the rest"
    assert failure("vllm", model="hy3", card="h100", cards=4).failure is StartFailure.WEIGHTS_OUT_OF_MEMORY
    assert launch("vllm", model="hy3", card="h100", cards=8, weight_bits=8).kv_capacity_tokens > 262_144


def test_a_7b_runs_on_one_24_gb_card():
    spec = launch("vllm", model="qwen2.5-7b", card="4090")
    assert (spec.max_batch, spec.token_budget, spec.context_tokens) == (256, 2048, 32_768)
    assert 80_000 < spec.kv_capacity_tokens < 120_000


def test_a_4_bit_mixtral_needs_half_its_experts_in_main_memory_on_a_24_gb_card():
    options = {"model": "mixtral-8x7b", "card": "rtx 3090", "weight_bits": 4.85}
    assert failure("llamacpp", **options).failure is StartFailure.WEIGHTS_OUT_OF_MEMORY
    spec = launch("llamacpp", host_expert_ratio=0.5, **options)
    assert spec.settings["n_cpu_moe"] == 16
    assert spec.memory.weights_bytes < 14.5 * GIB


def test_faster_main_memory_speeds_the_launched_server():
    def decode(host: Host) -> float:
        options = {"model": "qwen3-30b-a3b", "card": "3090", "weight_bits": 4.85, "host_expert_ratio": 0.5}
        return launch("llamacpp", host=host, **options).cost.seconds(Work(0, 0, 1, 1024))

    assert decode(Host(memory_bandwidth=200e9)) < 0.8 * decode(Host())


# ---- vLLM


@pytest.mark.parametrize(
    ("card", "model", "tokens"),
    [
        # Capacities that a public benchmark lists for vLLM with 4,096 tokens a step, 1,024 requests and 0.9 of the card.
        (H100_NVL, "llama-3.1-8b", 542_960),
        (H100_NVL, QWEN3_8B, 478_560),
        (H100_NVL, QWEN3_14B, 350_304),
        (H100_NVL, QWEN3_32B, 81_648),
        (RTX_6000_ADA, "llama-3.1-8b", 207_536),
        (RTX_6000_ADA, QWEN3_8B, 191_568),
    ],
)
def test_pools_of_vllm_are_within_a_tenth_of_reported_ones(card, model, tokens):
    asked = settings(gpu_memory_utilization=0.9, max_num_batched_tokens=4096, max_batch_size=1024, max_model_len=32768)
    spec = launch("vllm", model=model, card=card, settings=asked)
    assert spec.kv_capacity_tokens == pytest.approx(tokens, rel=0.1)
    assert spec.block_tokens == 16


@pytest.mark.parametrize(
    ("card", "batch", "budget"),
    [("h100", 1024, 8192), ("h200", 1024, 8192), ("a100-80gb", 256, 2048), ("4090", 256, 2048), ("l40s", 256, 2048)],
)
def test_defaults_of_vllm_follow_the_card(card, batch, budget):
    spec = launch("vllm", model="qwen2.5-7b", card=card)
    assert (spec.max_batch, spec.token_budget) == (batch, budget)
    assert spec.asked_max_batch is None
    assert spec.policy.on_full is OnFull.PREEMPT
    assert spec.policy.reserved_output_ratio == 0


def test_vllm_takes_what_the_settings_ask_for():
    asked = settings(
        model="hy3",
        engine="vllm",
        max_batch_size=48,
        max_model_len=32_768,
        max_num_batched_tokens=4096,
        kv_cache_dtype="fp8",
        gpu_memory_utilization=0.8,
        tensor_parallel_size=8,
        expert_parallel_size=8,
    )
    spec = launch("vllm", card="h200", cards=8, settings=asked)
    assert (spec.model, spec.max_batch, spec.context_tokens, spec.token_budget) == ("hy3", 48, 32_768, 4096)
    wide = launch("vllm", card="h200", cards=8, settings=replace(asked, kv_cache_dtype=None))
    assert spec.kv_blocks == pytest.approx(2 * wide.kv_blocks, abs=1)
    assert spec.settings == {
        "architecture": "HYV3ForCausalLM",
        "tensor_parallel_size": 8,
        "enable_expert_parallel": True,
        "gpu_memory_utilization": 0.8,
        "kv_cache_dtype": "fp8",
    }


def test_what_a_file_says_of_memory_is_heeded():
    config = str(CONFIGS / "deepseek-v3.json")
    plain = launch("vllm", model=config, card="h200", cards=8)
    drafting = launch("vllm", model=config, card="h200", cards=8, settings=settings(mtp_layers=1))
    assert drafting.memory.weights_bytes > plain.memory.weights_bytes
    assert drafting.memory.kv_cache_bytes / drafting.kv_capacity_tokens == 62 * 576 * 2
    narrow = settings(derived_from={"weight_bits": 8.0})
    assert launch("vllm", model="llama-3.1-8b", card="h100", settings=narrow).memory.weights_bytes < 9.1e9
    spread = launch("vllm", model="hy3", card="h200", cards=8, settings=settings(enable_expert_parallel=True))
    assert spread.settings["enable_expert_parallel"] is True
    asked_for = launch("vllm", model=str(CONFIGS / "qwen3-235b-a22b-nvfp4"), card="h200", cards=4)
    assert asked_for.memory.kv_cache_bytes / asked_for.kv_capacity_tokens == 94 * 2 * 128, "fp8, as the checkpoint asks"


def test_sglang_cuts_the_batch_to_its_pool_of_states():
    # As tests/samples/logs/check/sglang_0.5.19_capped_by_state.log tells of a real one.
    model = read_model(CONFIGS / "qwen3-next-80b-a3b.json")
    asked = Ask(model, find_card("h200").memory_bytes, "sglang", "NVIDIA H200", Split(2), max_batch=4000)
    spec = launch("sglang", model=model, card="h200", cards=2, settings=settings(max_batch_size=4000))
    assert spec.max_batch == most_requests(asked, card_terms(asked).kv_cache) < 4000
    assert spec.asked_max_batch == 4000
    small = launch("sglang", model=model, card="h200", cards=2, settings=settings(max_batch_size=64))
    assert small.max_batch == 64
    assert small.kv_capacity_tokens > 1.5 * spec.kv_capacity_tokens, "fewer states leave more to tokens"


def test_layers_in_main_memory_are_refused_and_not_passed_over():
    with pytest.raises(ConfigError, match="layers in main memory are not simulated"):
        launch("llamacpp", model="llama-3.1-8b", card="4090", settings=settings(gpu_layers=16))
    assert launch("llamacpp", model="llama-3.1-8b", card="4090", settings=settings(gpu_layers=99)).kv_blocks


def test_older_releases_of_vllm_take_less_of_the_card_by_default():
    new, old = (launch("vllm", model="qwen2.5-7b", card="h100", release=release) for release in ("0.33.0", "0.19.0"))
    assert old.release == "0.19.0"
    card = find_card("h100")
    ask = Ask(model=read_model("qwen2.5-7b"), card_bytes=card.memory_bytes, card_name=card.name)
    # They take a larger share, and count the graphs in it.
    expected = 0.02 * (card.memory_bytes - DRIVER_BYTES) - card_terms(ask).graphs
    assert new.memory.kv_cache_bytes - old.memory.kv_cache_bytes == pytest.approx(expected, rel=0.01)


def test_a_file_says_how_slots_share_the_cache_and_what_stays_in_main_memory():
    asked = settings(kv_unified=True, physical_batch_tokens=256, cpu_moe_layers=24, max_batch_size=4)
    spec = launch("llamacpp", model="qwen3-30b-a3b", card="4090", weight_bits=4.85, context_tokens=8192, settings=asked)
    assert (spec.settings["kv_unified"], spec.settings["n_ubatch"], spec.settings["n_cpu_moe"]) == (True, 256, 24)


def test_a_context_above_the_pool_keeps_vllm_from_starting():
    told = failure("vllm", model="llama-3.1-8b", card="4090")
    assert told.failure is StartFailure.KV_BELOW_ONE_REQUEST
    assert "max_model_len 131072 needs 16.00 GiB" in str(told)
    # One block is nobody's.
    fits = told.spec.kv_capacity_tokens - 16
    assert f"enough for {fits} tokens" in str(told)
    assert launch("vllm", model="llama-3.1-8b", card="4090", context_tokens=fits).kv_capacity_tokens == fits + 16
    assert failure("vllm", model="llama-3.1-8b", card="4090", context_tokens=fits + 1).spec.kv_blocks == fits // 16 + 1


def test_too_small_a_share_of_the_card_leaves_no_cache():
    told = failure("vllm", model="qwen2.5-7b", card="4090", settings=settings(gpu_memory_utilization=0.6))
    assert told.failure is StartFailure.NO_KV_CACHE
    assert "0.6 x 23.55 GiB" in str(told)
    assert "0.00 GiB are left" in str(told)
    assert told.spec.kv_blocks == 0
    assert told.exit_code == 2


def test_weights_above_the_card_are_told_with_both_numbers():
    told = failure("vllm", model="hy3", card="h200", cards=2)
    assert told.failure is StartFailure.WEIGHTS_OUT_OF_MEMORY
    assert "vllm with hy3 on 2 x NVIDIA H200 does not start" in str(told)
    assert "weights need 274.83 GiB on each card and 139.28 GiB are there" in str(told)
    none = failure("vllm", model="hy3", card="h200", cards=4, settings=settings(max_model_len=4096))
    assert none.failure is StartFailure.NO_KV_CACHE


def test_blocks_can_be_given_and_must_fit():
    spec = launch("vllm", model="qwen2.5-7b", card="4090", kv_blocks=129, context_tokens=2048)
    assert spec.kv_blocks == 129
    assert spec.settings["num_gpu_blocks_override"] == 129
    assert spec.settings["num_gpu_blocks_profiled"] > 5000
    assert spec.memory.kv_cache_bytes == 129 * 16 * 57_344
    few = failure("vllm", model="qwen2.5-7b", card="4090", kv_blocks=128, context_tokens=2048)
    assert few.failure is StartFailure.KV_BELOW_ONE_REQUEST
    many = failure("vllm", model="qwen2.5-7b", card="4090", kv_blocks=10**6)
    assert many.failure is StartFailure.NO_KV_CACHE
    assert "were asked for" in str(many)
    tokens = launch("vllm", model="qwen2.5-7b", card="4090", settings=settings(kv_cache_capacity_tokens=50_000))
    assert tokens.kv_blocks == 3125


def test_a_token_budget_below_the_batch_is_refused_as_vllm_refuses_it():
    with pytest.raises(ConfigError, match="512 tokens a step are fewer than 1024 requests"):
        launch("vllm", model="qwen2.5-7b", card="h100", max_batch=1024, token_budget=512)
    assert launch("vllm", model="qwen2.5-7b", card="h100", token_budget=512).max_batch == 512


@pytest.mark.parametrize(
    ("name", "cards", "bits"),
    [
        ("deepseek-v3", 8, None),
        ("gpt-oss-120b", 1, None),
        ("qwen3-next-80b-a3b", 4, None),
        ("kimi-linear-48b-a3b", 2, None),
        ("nemotron-h-56b", 8, None),
        ("llama-4-scout", 8, 8),
    ],
)
def test_latents_windows_and_states_can_be_launched(name, cards, bits):
    config = CONFIGS / f"{name}.json"
    spec = launch("vllm", model=str(config), card="h200", cards=cards, weight_bits=bits, context_tokens=8192)
    # The pool holds as many requests of full length as the budget says that this engine's does.
    shape = read_model(config) if bits is None else read_model(config).with_bits(bits)
    asked = Ask(
        shape,
        find_card("h200").memory_bytes,
        card_name="NVIDIA H200",
        split=Split(cards),
        context_tokens=8192,
        max_batch=spec.max_batch,
    )
    found = work_out(asked)
    assert spec.kv_capacity_tokens == pytest.approx(found.kv_tokens, rel=0.001)
    assert spec.memory.weights_bytes == found.terms.weights


# ---- SGLang


def test_a_pool_of_sglang_is_within_a_tenth_of_a_reported_one():
    # vllm-project/vllm#21348: Qwen3-235B-A22B-FP8 on 4 x H100 with mem_fraction_static 0.93 holds 367,404 tokens.
    asked = settings(gpu_memory_utilization=0.93)
    spec = launch("sglang", model=QWEN3_235B, card="h100", cards=4, settings=asked)
    assert spec.kv_capacity_tokens == pytest.approx(367_404, rel=0.1)
    assert spec.block_tokens == 1


@pytest.mark.parametrize(
    ("card", "chunk"), [("l4", 2048), ("4090", 2048), ("l40s", 4096), ("h100", 8192), ("h200", 8192), ("b200", 16384)]
)
def test_chunks_of_sglang_follow_the_card(card, chunk):
    spec = launch("sglang", model="qwen2.5-7b", card=card, context_tokens=8192)
    assert spec.token_budget == spec.settings["chunked_prefill_size"] == chunk
    assert spec.policy.prefill_first
    assert spec.policy.reserved_output_ratio == 0.7
    assert spec.policy.on_full is OnFull.PREEMPT


def test_sglang_cuts_the_running_limit_to_what_the_pool_allows():
    asked = settings(kv_cache_capacity_tokens=64, max_batch_size=48)
    spec = launch("sglang", model="qwen2.5-7b", card="4090", settings=asked)
    assert (spec.max_batch, spec.asked_max_batch) == (32, 48)
    assert spec.settings["max_running_requests"] == 48
    kept = launch("sglang", model="qwen2.5-7b", card="4090", settings=replace(asked, kv_cache_capacity_tokens=5000))
    assert (kept.max_batch, kept.asked_max_batch) == (48, None)


def test_sglang_estimates_the_running_limit_from_pool_and_context():
    spec = launch("sglang", model="qwen2.5-7b", card="h200")
    assert spec.max_batch == min(max(spec.kv_capacity_tokens * 512 // 32_768, 2048), 4096)
    assert launch("sglang", model="qwen2.5-7b", card="4090").max_batch == 2048


def test_sglang_starts_with_a_pool_below_the_context_and_refuses_longer_requests():
    spec = launch("sglang", model="llama-3.1-8b", card="4090")
    assert spec.context_tokens == spec.kv_capacity_tokens < 131_072
    assert spec.settings["context_length"] == 131_072


def test_sglang_fails_without_a_pool_and_in_its_warm_up():
    low = failure("sglang", model="llama-3.1-8b", card="4090", settings=settings(gpu_memory_utilization=0.6))
    assert low.failure is StartFailure.NO_KV_CACHE
    high = failure("sglang", model="llama-3.1-8b", card="4090", settings=settings(gpu_memory_utilization=0.985))
    assert high.failure is StartFailure.WARMUP_OUT_OF_MEMORY
    assert "mem_fraction_static 0.98" in str(high)


# ---- llama.cpp


def test_four_slots_share_the_context_of_llama_cpp_by_default():
    spec = launch("llamacpp", model="qwen3-30b-a3b", card="4090", weight_bits=4.85)
    assert (spec.max_batch, spec.kv_capacity_tokens, spec.context_tokens) == (4, 40_960, 40_960)
    assert spec.settings["kv_unified"] is True
    assert spec.policy.on_full is OnFull.FAIL
    assert spec.policy.counts_at_finish
    assert not spec.policy.partitioned
    assert (spec.token_budget, spec.settings["n_ubatch"]) == (2048, 512)


def test_a_number_of_slots_divides_the_context_of_llama_cpp():
    asked = settings(max_batch_size=8, kv_cache_capacity_tokens=16_384)
    spec = launch("llamacpp", model="qwen3-30b-a3b", card="4090", weight_bits=4.85, settings=asked)
    assert (spec.max_batch, spec.kv_capacity_tokens, spec.context_tokens) == (8, 16_384, 2048)
    assert spec.policy.partitioned
    assert spec.settings["kv_unified"] is False
    whole = launch("llamacpp", model="qwen3-30b-a3b", card="4090", weight_bits=4.85, settings=asked, partitioned=False)
    assert (whole.kv_capacity_tokens, whole.context_tokens) == (16_384, 16_384)


def test_slots_of_llama_cpp_are_rounded_up_and_capped_at_the_training_context():
    asked = settings(max_batch_size=3, kv_cache_capacity_tokens=1000)
    spec = launch("llamacpp", model="qwen2.5-7b", card="4090", settings=asked)
    assert (spec.context_tokens, spec.kv_capacity_tokens) == (512, 1536)
    large = launch("llamacpp", model="qwen2.5-7b", card="4090", settings=settings(kv_cache_capacity_tokens=65_536))
    assert (large.context_tokens, large.kv_capacity_tokens) == (32_768, 65_536)


def test_a_context_per_request_is_given_to_each_slot():
    asked = settings(max_batch_size=4, max_model_len=4096)
    spec = launch("llamacpp", model="qwen2.5-7b", card="4090", settings=asked)
    assert (spec.context_tokens, spec.kv_capacity_tokens) == (4096, 16_384)


def test_llama_cpp_fits_a_context_that_was_not_given_to_the_card():
    roomy = launch("llamacpp", model="llama-3.1-8b", card="h100")
    tight = launch("llamacpp", model="llama-3.1-8b", card="4090")
    assert roomy.context_tokens == 131_072
    assert 20_000 < tight.context_tokens < 131_072
    assert tight.context_tokens % 256 == 0
    assert tight.memory.reserve_bytes >= GIB
    told = failure("llamacpp", model="llama-3.1-8b", card="4090", context_tokens=131_072)
    assert told.failure is StartFailure.NO_KV_CACHE
    assert "131072 tokens needs 16.00 GiB" in str(told)


def test_llama_cpp_gives_each_card_its_own_layers():
    spec = launch("llamacpp", model="hy3", card="h200", cards=4, weight_bits=4.85, context_tokens=32_768)
    one = launch("llamacpp", model="qwen3-30b-a3b", card="h200", weight_bits=4.85)
    assert spec.card_parallel == 4
    assert one.card_parallel == 1
    # 80 layers and the output matrix on four cards: 21 of them on the first.
    assert spec.memory.kv_cache_bytes == 32_768 * 327_680 * 21 // 80


@given(ratio=st.floats(0, 1))
def test_experts_in_main_memory_make_room_on_the_card(ratio):
    none, some = (
        launch("llamacpp", model="qwen3-30b-a3b", card="4090", weight_bits=4.85, host_expert_ratio=share)
        for share in (0.0, ratio)
    )
    assert some.memory.weights_bytes <= none.memory.weights_bytes
    assert some.memory.reserve_bytes >= none.memory.reserve_bytes
    step = Work(0, 0, 1, 1000)
    assert some.cost.seconds(step) >= none.cost.seconds(step) * (1 - 1e-9)


# ---- all engines


@given(
    engine=st.sampled_from(["vllm", "sglang", "llamacpp"]),
    card=st.sampled_from(CARDS),
    model=st.sampled_from(["hy3", "llama-3.1-8b", "qwen3-30b-a3b", "mixtral-8x7b"]),
    cards=st.sampled_from([1, 2, 4, 8]),
    bits=st.sampled_from([16.0, 8.0, 4.85]),
    context=st.sampled_from([None, 2048, 32_768]),
)
def test_a_server_that_starts_fits_its_cards_and_one_that_does_not_says_why(engine, card, model, cards, bits, context):
    told = None
    try:
        spec = launch(engine, model=model, card=card, cards=cards, weight_bits=bits, context_tokens=context)
    except LaunchFailure as error:
        told, spec = error, error.spec
    if told is not None:
        assert spec.engine == engine
        assert "GiB" in str(told)
        return
    assert planned_bytes(spec) <= spec.memory.card_total_bytes
    assert planned_bytes(spec) + spec.memory.reserve_bytes == spec.memory.card_total_bytes
    assert spec.memory.kv_cache_bytes > 0
    assert 1 <= spec.context_tokens <= spec.kv_capacity_tokens
    assert spec.start_seconds > 0
    assert spec.cost.seconds(Work(0, 0, 1, 1)) > 0


def test_narrower_weights_leave_a_bigger_pool():
    pools = [launch("vllm", model="hy3", card="h200", cards=8, weight_bits=bits).kv_blocks for bits in (16, 8, 4.5)]
    assert pools == sorted(pools)


@pytest.mark.parametrize(
    ("engine", "options", "said"),
    [
        ("tgi", {"model": "hy3"}, "engine 'tgi' is not known; known: vllm, sglang, llamacpp"),
        ("vllm", {}, "no model"),
        ("vllm", {"model": "gpt-2"}, "nor a model known by that name"),
        ("vllm", {"model": "hy3", "settings": settings(engine="sglang")}, r"serving.yaml:1: engine is sglang"),
        ("vllm", {"model": "hy3", "weight_bits": 0.5}, "weight_bits is 0.5"),
        ("vllm", {"model": "hy3", "host_expert_ratio": 0.5}, "mean nothing to vllm"),
        ("sglang", {"model": "hy3", "partitioned": True}, "mean nothing to sglang"),
        ("vllm", {"model": "hy3", "max_batch": 0}, "max_batch is 0"),
        ("vllm", {"model": "hy3", "cards": 0}, "cards is 0"),
        ("vllm", {"model": "hy3", "context_tokens": 300_000}, "300000 tokens are more than the 262144"),
        (
            "vllm",
            {"model": "hy3", "settings": settings(kv_cache_dtype="int3")},
            "serving.yaml:1: .*'int3' is not known",
        ),
        ("vllm", {"model": "hy3", "settings": settings(data_parallel_size=2)}, "only one copy"),
        ("vllm", {"model": "hy3", "settings": settings(tensor_parallel_size=16)}, "16 x 1 cards are needed and 8"),
        (
            "vllm",
            {"model": "hy3", "settings": settings(expert_parallel_size=4)},
            "4 must be the tensor-parallel size, 8",
        ),
        ("sglang", {"model": "hy3", "settings": settings(expert_parallel_size=3)}, "3 must divide"),
        ("vllm", {"model": "qwen2.5-7b"}, "28 attention heads"),
        ("llamacpp", {"model": "llama-3.1-8b", "host_expert_ratio": 0.5}, "no experts"),
    ],
)
def test_what_cannot_be_is_refused(engine, options, said):
    with pytest.raises(ConfigError, match=said) as caught:
        launch(engine, card="h200", **({"cards": 8} | options))
    assert not isinstance(caught.value, LaunchFailure)


def test_a_card_may_be_a_name_or_a_card():
    by_name, by_card = (launch("vllm", model="qwen2.5-7b", card=card) for card in ("H100", find_card("h100")))
    assert replace(by_name, cost=by_card.cost) == by_card


def test_sglang_may_spread_experts_over_some_of_the_cards():
    asked = settings(tensor_parallel_size=8, expert_parallel_size=4)
    spec = launch("sglang", model="hy3", card="h200", cards=8, settings=asked)
    assert spec.settings["ep_size"] == 4


def test_the_served_name_is_the_settings_model(tmp_path):
    spec = launch("vllm", model="qwen2.5-7b", card="h100", settings=settings(model="/models/qwen"))
    assert spec.model == "/models/qwen"


def test_a_launched_server_is_told_apart_from_a_clamped_one():
    spec = launch("vllm", model="qwen2.5-7b", card="h100", max_batch=48)
    assert (spec.max_batch, spec.asked_max_batch) == (48, None)


def test_readiness_waits_for_the_weights():
    wide, narrow = (launch("vllm", model="hy3", card="h200", cards=8, weight_bits=bits) for bits in (16, 8))
    assert wide.start_seconds > narrow.start_seconds + 60
    assert launch("llamacpp", model="qwen2.5-7b", card="h100").start_seconds < 10


def test_the_model_may_be_a_shape():
    shape = read_model("qwen2.5-7b")
    assert launch("vllm", model=shape, card="h100").model == "qwen2.5-7b"


# ---- what was asked for, to the last block


@pytest.mark.parametrize(("release", "starts"), [("0.20.2", True), ("0.32.0", False), ("0.33.0", False)])
def test_vllm_counts_its_null_block_where_the_release_does(release, starts):
    """An older release starts with exactly one request's blocks, of which one is nobody's, and hangs on the request."""
    options = {"model": "qwen2.5-7b", "card": "4090", "release": release, "context_tokens": 1024}
    if starts:
        assert launch("vllm", kv_blocks=64, **options).kv_blocks == 64
    else:
        assert failure("vllm", kv_blocks=64, **options).failure is StartFailure.KV_BELOW_ONE_REQUEST
    assert launch("vllm", kv_blocks=65, **options).kv_blocks == 65


def test_a_pool_below_one_block_is_not_taken_for_none_asked():
    asked = settings(kv_cache_capacity_tokens=8, max_model_len=8)
    told = failure("vllm", model="qwen2.5-7b", card="4090", settings=asked)
    assert told.failure is StartFailure.KV_BELOW_ONE_REQUEST
    told = failure("sglang", model="qwen2.5-7b", card="4090", settings=asked, block_tokens=64)
    assert told.failure is StartFailure.NO_KV_CACHE
    assert "8 tokens is less than one block of 64" in str(told)


def test_llama_cpp_has_cells_of_one_token():
    assert launch("llamacpp", model="qwen2.5-7b", card="4090", kv_blocks=1000, block_tokens=1).kv_blocks == 1000
    with pytest.raises(ConfigError, match="cells of one token"):
        launch("llamacpp", model="qwen2.5-7b", card="4090", kv_blocks=1000, block_tokens=16)
