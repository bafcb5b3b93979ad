"""A shape's sizes: what each card holds of the weights, and what sequences leave in the cache."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.errors import ConfigError
from serving.model import (
    Attention,
    Dense,
    Experts,
    Indexer,
    LatentAttention,
    Layer,
    ModelShape,
    Module,
    RecurrentState,
    Split,
    UniformBits,
    Weights,
    read_model,
)

GIB = 2**30
CONFIGS = Path(__file__).parents[2] / "samples" / "configs"

PLAIN = Layer(Attention(32, 8, 128), Dense(1000), norms=256)
WINDOWED = Layer(Attention(32, 8, 128, window=100), Dense(1000), norms=256)
LATENT = Layer(LatentAttention(32, 512, 64, 128, 128, 256), Experts(16, 2, 64, 128))
STATE = Layer(
    RecurrentState(32, 128 * 128, 4096, 3, (Module("mixer.in_proj", "query", 1000),), 8, 256, state_bits=32.0), None
)
BLIND = Layer(None, Dense(1000, gated=False))


def shape(*layers, **options) -> ModelShape:
    return ModelShape("a-model", 64, 320, 4096, layers, **options)


def sample(name: str) -> ModelShape:
    return read_model(CONFIGS / f"{name}.json")


# ---- keys and values


@pytest.mark.parametrize(
    ("name", "cards", "expected"),
    [
        ("llama-3.1-8b", 1, 131_072),
        ("llama-3.1-8b", 8, 16_384),
        ("llama-3.1-8b", 16, 16_384),
        ("qwen3-14b", 1, 163_840),
        ("hy3", 1, 327_680),
        ("hy3", 8, 40_960),
        ("hy3", 16, 40_960),
        ("qwen3-30b-a3b", 1, 98_304),
        ("qwen3-30b-a3b", 4, 24_576),
        ("qwen3-30b-a3b", 8, 24_576),
        # One latent of 576 elements for each of 61 layers, which every card needs whole.
        *(("deepseek-v3", cards, 61 * 576 * 2) for cards in (1, 2, 8, 16)),
        ("kimi-k2", 8, 70_272),
        # Two neighbouring layers share one cache: 32 caches for 64 layers.
        ("hunyuan-large", 1, 32 * 2 * 8 * 80 * 2),
        # Only the layers without a window grow.
        ("gpt-oss-120b", 1, 18 * 2 * 8 * 64 * 2),
        ("gemma-3-27b", 1, 10 * 2 * 16 * 128 * 2),
        # One head of keys and values, which 71 query heads share.
        ("falcon-7b", 1, 32 * 2 * 64 * 2),
        # 12 of 48 layers, and 7 of 27 with a latent, attend; the others keep a state.
        ("qwen3-next-80b-a3b", 1, 12 * 2 * 2 * 256 * 2),
        ("kimi-linear-48b-a3b", 1, 7 * 576 * 2),
    ],
)
def test_kv_bytes_per_token(name, cards, expected):
    assert sample(name).kv_bytes_per_token(split=Split(tensor=cards)) == expected


def test_kv_bytes_follow_the_cache_type_and_the_stages():
    model = sample("qwen3-14b")
    assert model.kv_bytes_per_token(8) == 81_920
    assert model.kv_bytes_per_token(8.5) == 87_040
    assert model.kv_bytes_per_token(split=Split(pipeline=2)) == 81_920


def test_an_indexer_has_a_cache_of_its_own_that_stays_8_bit():
    # vLLM 0.32: 128 fp8 values with one 32-bit scale, beside a latent that fp8 packs into 656 bytes.
    model = sample("deepseek-v3.2")
    assert model.kv_bytes_per_token() == 61 * (1152 + 132)
    assert model.kv_bytes_per_token(8) == 61 * (656 + 132)
    assert model.kv_bytes_per_token(8, mtp_layers=1) == 62 * (656 + 132)
    assert sample("deepseek-v3").kv_bytes_per_token(8) == 61 * 576


def test_value_heads_may_be_narrower_than_key_heads():
    full, windowed = sample("mimo-v2-flash").layers[0].mixer, sample("mimo-v2-flash").layers[1].mixer
    assert full.token_bytes(16, 1) == 4 * (192 + 128) * 2
    assert windowed.token_bytes(16, 1) == 8 * (192 + 128) * 2


@pytest.mark.parametrize(
    ("name", "reported_gib", "reported_tokens"),
    [
        # vLLM start-up reports: 3.81 GiB -> 1,952 blocks of 16, 6.51 GiB -> 42,656 tokens, 24.0 GiB for 262,144.
        ("llama-3.1-8b", 3.81, 1952 * 16),
        ("qwen3-14b", 6.51, 42_656),
        ("qwen3-coder-30b-a3b", 24.0, 262_144),
        ("qwen3-coder-30b-a3b", 3.18, 34_736),
    ],
)
def test_reported_pools_hold_the_reported_tokens(name, reported_gib, reported_tokens):
    # Reports are rounded to 0.01 GiB.
    assert reported_gib * GIB / sample(name).kv_bytes_per_token() == pytest.approx(reported_tokens, rel=0.002)


def test_a_window_holds_no_more_than_itself():
    model = shape(PLAIN, WINDOWED, WINDOWED)
    token = 2 * 8 * 128 * 2
    assert model.kv_bytes_per_token() == token
    assert model.sequence_bytes(60) == 3 * 60 * token
    assert model.sequence_bytes(1000) == (1000 + 2 * 100) * token
    assert model.sequence_bytes(1000, clip_windows=False) == 3 * 1000 * token
    assert model.sequence_bytes(0) == 0


def test_a_state_takes_the_same_whatever_the_length():
    model = shape(PLAIN, STATE)
    # Three inputs of 4,096 + 8 x 256 channels in 16 bits, 32 heads of 128 x 128 in 32 bits.
    state = 3 * (4096 + 8 * 256) * 2 + 32 * 128 * 128 * 4
    assert model.state_bytes() == state
    assert model.sequence_bytes(10) == 10 * 4096 + state
    assert model.sequence_bytes(10, 8) == 10 * 2048 + state
    assert model.state_bytes(state_bits=16) == state - 32 * 128 * 128 * 2
    assert model.state_bytes(Split(8)) == state // 8
    # Each card needs a group of its own.
    assert shape(replace(STATE, mixer=replace(STATE.mixer, groups=1))).state_bytes(Split(8)) == (
        3 * (512 + 256) * 2 + 4 * 128 * 128 * 4
    )


@pytest.mark.parametrize(
    ("name", "cards", "state_bits", "tokens", "padding"),
    [
        # vLLM makes a page of attention as large as the state of a layer, in multiples of 16 tokens, pads the state to
        # it, and logs both. Nemotron-Nano-9B-v2, whose state had 16 bits then: vllm-project/vllm#24280.
        ("nemotron-nano-9b-v2", 1, 16, 672, None),
        # A public log of vLLM 0.10.2 with Qwen3-Next-80B-A3B-Instruct on two H200.
        ("qwen3-next-80b-a3b", 2, None, 544, 0.0149),
        # Qwen3.6-27B, which has this shape, and Kimi-Linear on two cards, as a deployment guide lists them.
        ("qwen3.5-27b", 1, None, 784, None),
        ("kimi-linear-48b-a3b", 2, None, 944, None),
    ],
)
def test_states_are_as_large_as_vllm_makes_its_pages(name, cards, state_bits, tokens, padding):
    mixers = [layer.mixer for layer in sample(name).layers if layer.mixer is not None]
    state = max(mixer.state_bytes(cards, state_bits) for mixer in mixers)
    token = max(mixer.token_bytes(16, cards) for mixer in mixers)
    assert -(-state // (16 * token)) * 16 == tokens
    if padding is not None:
        assert tokens * token / state - 1 == pytest.approx(padding, abs=0.00005)


def test_weights_on_each_card_are_as_vllm_reports_them():
    # The same log: 74.2812 GiB on each of the two cards.
    model = sample("qwen3-next-80b-a3b")
    assert model.weight_bytes(Split(2)).total / GIB == pytest.approx(74.2812, rel=0.001)


def test_the_state_of_qwen3_5_has_the_reported_bytes_on_one_of_8_cards():
    # vllm-project/vllm-ascend#7393: Qwen3.5 35B with 8 cards has 262,144 bytes of recurrent state in a layer.
    state = next(layer.mixer for layer in sample("qwen3.5-35b-a3b").layers if isinstance(layer.mixer, RecurrentState))
    assert state.heads // 8 * state.head_elements * state.state_bits / 8 == 262_144


@pytest.mark.parametrize(
    ("name", "cards", "pool_gib", "context", "concurrency"),
    [
        # The log of Qwen3-Next on two H200: 44.59 GiB hold 14.77 requests of 262,144 tokens.
        ("qwen3-next-80b-a3b", 2, 44.59, 262_144, 14.77),
        # vllm-project/vllm#28228: Kimi-Linear on two cards, 2.30 GiB for 2.48 requests of 120,000 tokens.
        ("kimi-linear-48b-a3b", 2, 2.30, 120_000, 2.48),
    ],
)
def test_reported_pools_hold_the_reported_requests_of_hybrid_models(name, cards, pool_gib, context, concurrency):
    held = sample(name).sequence_bytes(context, split=Split(cards))
    assert pool_gib * GIB / held == pytest.approx(concurrency, rel=0.01)


@given(
    tokens=st.integers(0, 10_000),
    more=st.integers(0, 10_000),
    split=st.builds(Split, st.sampled_from([1, 2, 4, 8]), st.integers(1, 4)),
    kv_bits=st.sampled_from([16.0, 8.0, 4.5]),
)
def test_a_longer_sequence_never_holds_less_and_grows_by_the_cost_of_a_token(tokens, more, split, kv_bits):
    model = shape(PLAIN, WINDOWED, LATENT, STATE, BLIND)
    short, long = (model.sequence_bytes(count, kv_bits, split) for count in (tokens, tokens + more))
    assert short <= long
    clipped = max(0, tokens - 100) and more
    stages = [[model.layers[number] for number in stage] for stage in model.stages(split.pipeline)]
    if clipped and split.pipeline == 1:
        assert long - short == pytest.approx(more * model.kv_bytes_per_token(kv_bits, split), abs=more + 1)
    assert sum(map(len, stages)) == len(model.layers)


# ---- weights


@pytest.mark.parametrize(
    ("layers", "stages", "sizes"),
    [
        (80, 4, [20, 20, 20, 20]),
        # vLLM gives what is left over to the stages before the last.
        (61, 2, [31, 30]),
        (61, 4, [15, 15, 16, 15]),
        (62, 4, [15, 16, 16, 15]),
        (63, 4, [16, 16, 16, 15]),
        (5, 5, [1, 1, 1, 1, 1]),
    ],
)
def test_layers_that_do_not_divide_go_to_the_middle_stages(layers, stages, sizes):
    parts = shape(*[PLAIN] * layers).stages(stages)
    assert [len(part) for part in parts] == sizes
    assert [number for part in parts for number in part] == list(range(layers))


@given(
    name=st.sampled_from(["hy3", "llama-3.1-8b", "mixtral-8x7b"]),
    tensor=st.sampled_from([1, 2, 4, 8, 16]),
    pipeline=st.integers(1, 4),
)
def test_the_fullest_card_holds_at_least_its_share_and_never_the_whole(name, tensor, pipeline):
    model = read_model(name)
    part = model.on_card(Split(tensor, pipeline)).total
    cards = tensor * pipeline
    assert part >= model.total_parameters / cards
    assert part <= model.total_parameters / cards * 1.25 + model.vocabulary * model.hidden
    assert model.weight_bytes(Split(tensor, pipeline)).total == 2 * part


def test_expert_parallelism_divides_nothing_but_experts():
    model = read_model("hy3")
    whole, spread = model.on_card(Split()), model.on_card(Split(expert=8))
    assert spread.experts * 8 == whole.experts
    assert replace(spread, experts=whole.experts) == whole


def test_expert_parallelism_inside_a_tensor_split_holds_as_much_as_without():
    model = read_model("hy3")
    assert model.on_card(Split(8, 1, 8)) == model.on_card(Split(8)) == model.on_card(Split(8, 1, 4))


def test_projections_down_to_a_latent_are_on_every_card_and_those_up_from_it_are_divided():
    mixer = LatentAttention(32, 512, 64, 128, 128, 256, Indexer(4, 128))
    model = shape(replace(LATENT, mixer=mixer))
    whole, part = model.on_card(Split()), model.on_card(Split(8))
    down = 64 * 256 + 64 * (512 + 64)
    index = 256 * 4 * 128 + 64 * 128 + 64 * 4
    assert whole.key_value == part.key_value == down + index
    assert whole.query == 8 * part.query == 256 * 32 * 192 + 512 * 32 * 256 + 64 * 32 * 128


def test_the_stage_with_most_bytes_counts_and_a_tied_matrix_is_on_both_ends():
    untied, tied = shape(PLAIN, PLAIN, PLAIN), shape(PLAIN, PLAIN, PLAIN, tied_embeddings=True, other=64)
    matrix = 64 * 320
    assert (untied.on_card(Split()).embedding, untied.on_card(Split()).head) == (matrix, matrix)
    assert (tied.on_card(Split()).embedding, tied.on_card(Split()).head) == (matrix, 0)
    # Of two stages the first has two layers and the embedding.
    first = untied.on_card(Split(1, 2))
    assert (first.embedding, first.head) == (matrix, 0)
    assert first.dense == 2 * 3 * 64 * 1000
    last = shape(PLAIN, PLAIN, tied_embeddings=True, other=64).on_card(Split(1, 2))
    assert (last.embedding, last.head, last.other) == (0, matrix, 256 + 64)


def test_modules_for_multi_token_prediction_are_on_the_last_stage_when_they_are_used():
    model = read_model("hy3")
    without, used = model.weight_bytes(), model.weight_bytes(mtp_layers=1)
    assert used.total - without.total == 2 * model.mtp_parameters
    assert model.kv_bytes_per_token(mtp_layers=1) - model.kv_bytes_per_token() == 4096
    assert model.on_card(Split(1, 4), mtp_layers=1).head
    with pytest.raises(ConfigError, match="1 modules for multi-token prediction, not 2"):
        model.kv_bytes_per_token(mtp_layers=2)
    with pytest.raises(ConfigError, match="not 2"):
        model.weight_bytes(mtp_layers=2)


def test_layers_may_have_a_mixer_or_a_feed_forward_part_only():
    model = shape(STATE, BLIND, other=64)
    assert model.total_parameters == 2 * 64 * 320 + 1000 + 2 * 64 * 1000 + 64
    assert model.kv_bytes_per_token() == 0
    assert (model.experts, model.expert_layers, model.experts_per_token) == (0, 0, 0)


def test_a_layer_that_reads_the_keys_and_values_of_another_has_none():
    shared = replace(PLAIN, mixer=replace(PLAIN.mixer, shares_kv=True))
    assert shape(PLAIN, shared).parameters.key_value == shape(PLAIN).parameters.key_value
    assert shape(PLAIN, shared).sequence_bytes(100) == shape(PLAIN).sequence_bytes(100)


def test_values_that_are_keys_save_weights_and_no_cache():
    alike = replace(PLAIN, mixer=replace(PLAIN.mixer, value_is_key=True))
    assert 2 * shape(alike).parameters.key_value == shape(PLAIN).parameters.key_value
    assert shape(alike).kv_bytes_per_token() == shape(PLAIN).kv_bytes_per_token()


def test_bits_are_asked_for_module_by_module():
    class Narrow:
        method = "test"
        activation_bits = None

        def __init__(self):
            self.asked = set()

        def bits(self, module, columns=None):
            self.asked.add(module)
            return 4.0 if ".experts." in module else 16.0

    narrow = Narrow()
    model = shape(LATENT, LATENT, quantization=narrow)
    stored, count = model.weight_bytes(), model.parameters
    assert stored.experts == count.experts / 2
    assert replace(stored, experts=2 * count.experts) == Weights(
        *(2 * getattr(count, kind) for kind in Weights.__dataclass_fields__)
    )
    assert {"model.embed_tokens", "lm_head", "model.layers.1.mlp.experts.0.gate_proj", "model.layers.0.mlp.gate"} <= (
        narrow.asked
    )


def test_norms_and_biases_keep_16_bits():
    layer = Layer(Attention(4, 4, 16, other=10), Experts(4, 1, 8, bias=7, other=3), norms=5)
    narrow = shape(layer, quantization=UniformBits(4.0))
    plain = shape(layer)
    assert narrow.weight_bytes().other == plain.weight_bytes().other == 2 * 18
    assert narrow.weight_bytes().experts - plain.weight_bytes().experts / 4 == 4 * 7 * 2 * 0.75


def test_with_bits_leaves_embedding_and_output_unless_told():
    model = read_model("llama-3.1-8b")
    matrix = model.vocabulary * model.hidden
    assert model.with_bits(8).weight_bytes().embedding == 2 * matrix
    assert model.with_bits(8, 8).weight_bytes().head == matrix
    assert model.with_bits(8).with_bits(4).weight_bytes().embedding == 2 * matrix
    assert model.with_bits(8).quantization.activation_bits == 8
    assert model.with_bits(4.85).quantization.activation_bits is None
    assert model.with_bits(4.85).quantization.method == "4.85 bits"


@pytest.mark.parametrize(
    ("name", "split", "said"),
    [
        ("qwen2.5-7b", Split(8), "28 attention heads"),
        ("hy3", Split(1, 81), "80 layers"),
        ("hy3", Split(1, 1, 5), "192 experts"),
        ("llama-3.1-8b", Split(1, 1, 2), "no experts"),
        ("deepseek-v3", Split(3), "128 attention heads"),
        ("falcon-7b", Split(2), "71 attention heads"),
        ("phi-4", Split(4), "10 key-value heads"),
        ("qwen3-next-80b-a3b", Split(32), "16 attention heads"),
    ],
)
def test_a_split_that_does_not_divide_is_refused(name, split, said):
    with pytest.raises(ConfigError, match=said):
        sample(name).on_card(split)


def test_recurrent_layers_divide_by_their_heads_and_groups():
    with pytest.raises(ConfigError, match="32 heads in its recurrent layers"):
        shape(STATE).check_split(Split(5))
    with pytest.raises(ConfigError, match="8 groups in its recurrent layers"):
        shape(STATE).check_split(Split(16))
    shape(replace(STATE, mixer=replace(STATE.mixer, groups=1))).check_split(Split(16))


def test_a_split_of_nothing_is_refused():
    with pytest.raises(ConfigError, match="at least 1"):
        Split(tensor=0)


def test_active_parameters_count_the_experts_that_a_token_meets():
    model = shape(LATENT, LATENT)
    idle = 2 * 14 * 3 * 64 * 64
    assert model.total_parameters - model.active_parameters == idle
    assert model.active_parameters - model.active_without_embedding == 64 * 320
    tied = replace(model, tied_embeddings=True)
    assert tied.active_without_embedding == tied.active_parameters


def test_experts_in_a_latent_are_narrower_and_have_projections_to_it():
    model = shape(Layer(None, Experts(16, 2, 64, gated=False, latent=32)))
    parameters = model.parameters
    assert parameters.experts == 16 * 2 * 32 * 64
    assert parameters.dense == 2 * 64 * 32
