"""A tiny language model with random weights, made on the spot: what the demo and the tests serve.

No download, no compiler, no licence: the weights are drawn from a seeded generator and written in less than a second.
The same weights and the same byte-level BPE tokenizer can be written as a GGUF file (llama.cpp) and as a Hugging Face
folder (vLLM, SGLang, transformers), so that engines can be compared. The text is nonsense but printable. A model with
experts has Mixtral's architecture, one without has Llama's.

Two tricks keep this short and quick:

* A weight is one byte, an index into a palette of 256 numbers that F16 and BF16 hold exactly. Writing a tensor is then
  one `bytes.translate` per byte of the wider type, without a loop over weights.
* Hidden dimension 0 carries a constant that no layer changes, so column 0 of the output matrix is a bias for each
  token. It suppresses bytes that would break the text and gives the end-of-sequence token its probability.
"""

import contextlib
import hashlib
import itertools
import json
import math
import os
import random
import shutil
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from serving.errors import ConfigError

__all__ = ["PRESETS", "TinyShape", "cached_gguf", "write_gguf", "write_hf"]


@dataclass(frozen=True, slots=True)
class TinyShape:
    """Size and behaviour of a tiny model. Defaults are the preset `tiny`.

    Attributes:
        hidden: width of the residual stream.
        layers: transformer blocks.
        heads: query heads; `kv_heads` key and value heads, each `head_dim` wide.
        ffn: width of the feed-forward part (of each expert, where there are experts).
        vocab: tokens, special ones included; at least 1,024.
        experts: experts per layer; 0 makes a dense model.
        experts_used: experts that each token passes through.
        context_tokens: context length the model claims to have been trained for.
        mean_output_tokens: rough average length of an answer sampled at temperature 1 without top-k (wider and deeper
            models run to twice that).
        seed: of the weights.
    """

    hidden: int = 128
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    ffn: int = 256
    vocab: int = 4096
    experts: int = 8
    experts_used: int = 2
    context_tokens: int = 32_768
    mean_output_tokens: int = 200
    seed: int = 1


PRESETS: Final[Mapping[str, TinyShape]] = MappingProxyType(
    {
        "tiny": TinyShape(),
        "demo": TinyShape(hidden=192, layers=3, heads=6, ffn=384),
        "small": TinyShape(hidden=512, layers=8, heads=8, kv_heads=4, head_dim=64, ffn=512, vocab=8192),
    }
)

_FORMAT = 1  # raised when the same shape is to give other bytes, so that no cache serves an old file
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_WORDS = """
the of and to in is you that it he was for on are as with his they at be this have from or one had by word but not what
all were we when your can said there use an each which she do how their if will up other about out many then them these
so some her would make like him into time has look two more write go see number no way could people my than first water
been call who oil its now find long down day did get come made may part over new sound take only little work know place
year live me back give most very after thing our just name good sentence man think say great where help through much
before line right too mean old any same tell boy follow came want show also around form three small set put end does
another well large must big even such because turn here why ask went men read need land different home us move try kind
hand picture again change off play spell air away animal house point page letter mother answer found study still learn
should world high every near add food between own below country plant last school father keep tree never start city
request server token model latency queue batch cache prompt decode memory metric alert load user stream error cost
"""


# --- tokenizer ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    tokens: tuple[str, ...]  # index is the token's number; the special tokens come last
    merges: tuple[tuple[str, str], ...]

    @property
    def first_special(self) -> int:
        return len(self.tokens) - len(_SPECIAL)


def _byte_alphabet() -> list[str]:
    """One visible character for each byte, as in GPT-2's byte-level BPE."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    spare = itertools.count(0x100)
    return [chr(byte) if byte in visible else chr(next(spare)) for byte in range(256)]


def _candidate_words(space: str) -> Iterator[str]:
    yield from (space + word for word in _WORDS.split())
    yield from ("user", "assistant", "system")
    stems = [space + consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]
    while True:
        yield from stems
        stems = [stem + consonant + vowel for stem in stems for consonant in "lmnrst" for vowel in "aeo"]


def _vocabulary(size: int) -> _Vocabulary:
    """Bytes, then every prefix of the candidate words: each merge adds one character to a known prefix."""
    alphabet = _byte_alphabet()
    tokens = list(alphabet)
    merges: list[tuple[str, str]] = []
    known, room = set(tokens), size - len(_SPECIAL)
    for word in _candidate_words(alphabet[ord(" ")]):
        for end in range(2, len(word) + 1):
            if word[:end] not in known:
                if len(tokens) == room:
                    return _Vocabulary((*tokens, *_SPECIAL), tuple(merges))
                known.add(word[:end])
                tokens.append(word[:end])
                merges.append((word[: end - 1], word[end - 1]))
    raise AssertionError("the stems grow without end")


# --- weights ------------------------------------------------------------------------------------------------------

_CONSTANT, _NEVER, _ENDS = 128, 129, 130  # palette entries that are never drawn: used for dimension 0 alone
_ZERO_RESERVED = bytes(0 if code in (_CONSTANT, _NEVER, _ENDS) else code for code in range(256))
_CODE_DEVIATION = 256 / math.sqrt(12)  # standard deviation of a uniformly drawn signed byte


def _palette(exponent: int, *, constant: float = 0.0, never: float = 0.0, ends: float = 0.0) -> tuple[float, ...]:
    """Signed bytes times a power of two: at most seven significant bits, exact in F16 and BF16."""
    values = [(code - 256 if code > 127 else code) * 2.0**exponent for code in range(256)]
    values[_CONSTANT], values[_NEVER], values[_ENDS] = constant, never, ends
    return tuple(values)


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A matrix (or a vector) under its two names; the experts of one kind share their GGUF name and are stacked."""

    gguf_name: str
    hf_name: str
    shape: tuple[int, ...]
    codes: bytes
    palette: tuple[float, ...]
    rotary_heads: int = 0
    keep_f32: bool = False

    def encode(self, codes: bytes, letter: str) -> bytes:
        """The weights as little-endian `f` (F32), `e` (F16) or `b` (BF16, the upper half of F32)."""
        if letter == "b":
            planes, first = struct.pack("<256f", *self.palette), 2
            width, stride = 2, 4
        else:
            planes, first = struct.pack(f"<256{letter}", *self.palette), 0
            width = stride = struct.calcsize(letter)
        encoded = bytearray(len(codes) * width)
        for place in range(width):
            encoded[place::width] = codes.translate(planes[first + place :: stride])
        return bytes(encoded)

    def interleaved_codes(self) -> bytes:
        """Rows as llama.cpp wants them: rotary pairs side by side where Hugging Face stores two halves."""
        if not self.rotary_heads:
            return self.codes
        rows, columns = self.shape
        half = rows // self.rotary_heads // 2
        order = (2 * head * half + side * half + pair
                 for head in range(self.rotary_heads) for pair in range(half) for side in (0, 1))  # fmt: skip
        return b"".join(self.codes[row * columns : (row + 1) * columns] for row in order)


def _tensors(shape: TinyShape, vocabulary: _Vocabulary) -> Iterator[_Tensor]:
    draw_bytes = random.Random(shape.seed).randbytes
    hidden = shape.hidden

    def draw(rows: int, columns: int = hidden, *, spare_row_0: bool = False) -> bytes:
        codes = bytearray(draw_bytes(rows * columns).translate(_ZERO_RESERVED))
        if spare_row_0:  # the constant in dimension 0 must pass through every layer
            codes[:columns] = bytes(columns)
        return bytes(codes)

    def norm(gguf_name: str, hf_name: str) -> _Tensor:
        return _Tensor(gguf_name, hf_name, (hidden,), bytes([1]) * hidden, _palette(0), keep_f32=True)

    # Small enough that the residual stream stays dominated by the embedding, whatever the width.
    exponent = -round(7.5 + math.log2(hidden) / 2)
    narrow, wide, router = _palette(exponent), _palette(exponent + 1), _palette(exponent + 2)

    embedding = bytearray(draw(shape.vocab))
    embedding[::hidden] = bytes([_CONSTANT]) * shape.vocab
    constant = 4.0
    yield _Tensor(
        "token_embd.weight",
        "model.embed_tokens.weight",
        (shape.vocab, hidden),
        bytes(embedding),
        _palette(-6, constant=constant),
    )
    for layer in range(shape.layers):
        ours, theirs = f"blk.{layer}.", f"model.layers.{layer}."
        yield norm(ours + "attn_norm.weight", theirs + "input_layernorm.weight")
        for ours_name, theirs_name, heads, rotary in (
            ("attn_q", "q_proj", shape.heads, shape.heads),
            ("attn_k", "k_proj", shape.kv_heads, shape.kv_heads),
            ("attn_v", "v_proj", shape.kv_heads, 0),
        ):
            rows = heads * shape.head_dim
            name = f"{theirs}self_attn.{theirs_name}.weight"
            yield _Tensor(f"{ours}{ours_name}.weight", name, (rows, hidden), draw(rows), narrow, rotary)
        columns = shape.heads * shape.head_dim
        codes = draw(hidden, columns, spare_row_0=True)
        name = theirs + "self_attn.o_proj.weight"
        yield _Tensor(ours + "attn_output.weight", name, (hidden, columns), codes, router)
        yield norm(ours + "ffn_norm.weight", theirs + "post_attention_layernorm.weight")
        up, down = (shape.ffn, hidden), (hidden, shape.ffn)
        if not shape.experts:
            for kind in ("gate", "up"):
                name = f"{theirs}mlp.{kind}_proj.weight"
                yield _Tensor(f"{ours}ffn_{kind}.weight", name, up, draw(shape.ffn), narrow)
            codes = draw(*down, spare_row_0=True)
            yield _Tensor(ours + "ffn_down.weight", theirs + "mlp.down_proj.weight", down, codes, wide)
            continue
        moe = theirs + "block_sparse_moe."
        routes = (shape.experts, hidden)
        yield _Tensor(ours + "ffn_gate_inp.weight", moe + "gate.weight", routes, draw(*routes), router, keep_f32=True)
        for kind, number, size, palette in (("gate", 1, up, narrow), ("up", 3, up, narrow), ("down", 2, down, wide)):
            for expert in range(shape.experts):
                codes = draw(*size, spare_row_0=kind == "down")
                name = f"{moe}experts.{expert}.w{number}.weight"
                yield _Tensor(f"{ours}ffn_{kind}_exps.weight", name, size, codes, palette)
    yield norm("output_norm.weight", "model.norm.weight")

    # A normalised hidden state has unit mean square, so a text token's logit is normal with this deviation, and the
    # sum over n tokens of exp(logit) is about n * exp(deviation**2 / 2). The bias makes the end token 1/mean of it.
    exponent = -round(5.5 + math.log2(hidden) / 2)
    deviation = math.sqrt(hidden) * _CODE_DEVIATION * 2.0**exponent
    unprintable = [code for code in range(256) if not 32 <= code < 127]
    text_tokens = shape.vocab - len(unprintable) - len(_SPECIAL)
    bias = math.log(text_tokens) + deviation**2 / 2 - math.log(shape.mean_output_tokens)
    mean_square = (constant**2 + (hidden - 1) * (_CODE_DEVIATION * 2.0**-6) ** 2) / hidden
    ends = round(bias * math.sqrt(mean_square) / constant * 16) / 16
    output = bytearray(draw(shape.vocab))
    output[::hidden] = bytes(shape.vocab)
    end_of_text, turn_starts, turn_ends = range(vocabulary.first_special, shape.vocab)
    for token in (end_of_text, turn_ends):
        output[token * hidden : (token + 1) * hidden] = bytes(hidden)
    for token in (*unprintable, end_of_text, turn_starts):
        output[token * hidden] = _NEVER
    output[turn_ends * hidden] = _ENDS
    yield _Tensor(
        "output.weight",
        "lm_head.weight",
        (shape.vocab, hidden),
        bytes(output),
        _palette(exponent, never=-8.0, ends=ends),
    )


# --- files --------------------------------------------------------------------------------------------------------


def write_gguf(path: Path, shape: TinyShape) -> None:
    """Write the model as one GGUF file (version 3, F16) for llama.cpp.

    The file appears at once or not at all: it is written beside `path` and renamed. Format: the GGUF specification
    in llama.cpp's `docs/gguf.md`.

    Raises:
        ConfigError: the folder cannot be written, or the shape is impossible.
    """
    vocabulary = _checked_vocabulary(shape)
    tensors = []
    for name, group in itertools.groupby(_tensors(shape, vocabulary), key=lambda tensor: tensor.gguf_name):
        parts = list(group)
        letter, ggml_type = ("f", 0) if parts[0].keep_f32 else ("e", 1)
        stacked = (len(parts), *parts[0].shape) if len(parts) > 1 else parts[0].shape
        data = b"".join(part.encode(part.interleaved_codes(), letter) for part in parts)
        tensors.append((name, stacked, ggml_type, data))

    facts = _gguf_facts(shape, vocabulary)
    head = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(facts))]
    head += [_gguf_string(key) + _gguf_value(value) for key, value in facts.items()]
    offset = 0
    for name, sizes, ggml_type, data in tensors:
        innermost_first = struct.pack(f"<I{len(sizes)}Q", len(sizes), *reversed(sizes))
        head.append(_gguf_string(name) + innermost_first + struct.pack("<IQ", ggml_type, offset))
        offset += len(_padded(data))
    with _appearing(path) as temporary:
        temporary.write_bytes(b"".join([_padded(b"".join(head)), *(_padded(data) for *_, data in tensors)]))


def write_hf(folder: Path, shape: TinyShape) -> None:
    """Write the model as a Hugging Face folder: config, generation config, tokenizer and BF16 safetensors.

    The folder appears at once or not at all, and must not exist before.

    Raises:
        ConfigError: the folder exists or cannot be written, or the shape is impossible.
    """
    vocabulary = _checked_vocabulary(shape)
    if folder.exists():
        raise ConfigError(f"model folder {folder} exists; name one that does not, or remove it first")
    index: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    blobs, offset = [], 0
    for tensor in _tensors(shape, vocabulary):
        blobs.append(tensor.encode(tensor.codes, "b"))
        span = [offset, offset + len(blobs[-1])]
        index[tensor.hf_name] = {"dtype": "BF16", "shape": tensor.shape, "data_offsets": span}
        offset = span[1]
    head = json.dumps(index).encode()
    head += b" " * (-len(head) % 8)
    with _appearing(folder) as temporary:
        temporary.mkdir()
        (temporary / "model.safetensors").write_bytes(b"".join([struct.pack("<Q", len(head)), head, *blobs]))
        for name, content in _hf_files(shape, vocabulary).items():
            (temporary / name).write_text(json.dumps(content, ensure_ascii=False, indent=1), encoding="utf-8")


def cached_gguf(cache_dir: Path, shape: TinyShape) -> Path:
    """The GGUF file of `shape` in `cache_dir`, made when it is not there yet; safe when several processes ask.

    Raises:
        ConfigError: the folder cannot be written, or the shape is impossible.
    """
    digest = hashlib.sha256(repr((_FORMAT, sorted(asdict(shape).items()))).encode()).hexdigest()[:12]
    path = cache_dir / f"tiny-{'moe' if shape.experts else 'dense'}-{digest}.gguf"
    if not path.exists():
        write_gguf(path, shape)
    return path


def _checked_vocabulary(shape: TinyShape) -> _Vocabulary:
    if shape.vocab < 1024 or shape.hidden < 32 or shape.head_dim % 2 or shape.heads % shape.kv_heads:
        raise ConfigError(
            f"impossible tiny model {shape}: it needs vocab >= 1024, hidden >= 32, an even head_dim, and heads that "
            "are a multiple of kv_heads"
        )
    if shape.experts and not 1 <= shape.experts_used <= shape.experts:
        raise ConfigError(f"impossible tiny model: experts_used {shape.experts_used} of {shape.experts} experts")
    return _vocabulary(shape.vocab)


@contextlib.contextmanager
def _appearing(path: Path) -> Iterator[Path]:
    """A temporary name beside `path` that is renamed to it when the block succeeds, and removed when it does not."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        temporary.replace(path)
    except OSError as error:
        raise ConfigError(f"cannot write the model {path}: {error.strerror or error}; name another folder") from error
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary, ignore_errors=True)
        else:
            temporary.unlink(missing_ok=True)


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 32)


def _gguf_string(text: str) -> bytes:
    encoded = text.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def _gguf_value(value: bool | float | str | Sequence[str] | Sequence[int]) -> bytes:
    match value:
        case bool():
            return struct.pack("<I?", 7, value)
        case int():
            return struct.pack("<II", 4, value)
        case float():
            return struct.pack("<If", 6, value)
        case str():
            return struct.pack("<I", 8) + _gguf_string(value)
        case [str(), *_]:
            return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(_gguf_string(str(text)) for text in value)
        case _:
            return struct.pack(f"<IIQ{len(value)}i", 9, 5, len(value), *value)


def _gguf_facts(shape: TinyShape, vocabulary: _Vocabulary) -> dict[str, Any]:
    end_of_text, _, turn_ends = range(vocabulary.first_special, shape.vocab)
    facts: dict[str, Any] = {
        "general.architecture": "llama",  # llama.cpp's name for Mixtral too
        "general.name": "tiny-moe" if shape.experts else "tiny",
        "general.file_type": 1,
        "llama.context_length": shape.context_tokens,
        "llama.embedding_length": shape.hidden,
        "llama.block_count": shape.layers,
        "llama.feed_forward_length": shape.ffn,
        "llama.attention.head_count": shape.heads,
        "llama.attention.head_count_kv": shape.kv_heads,
        "llama.attention.key_length": shape.head_dim,
        "llama.attention.value_length": shape.head_dim,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.dimension_count": shape.head_dim,
        "llama.rope.freq_base": 10_000.0,
        "llama.vocab_size": shape.vocab,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": vocabulary.tokens,
        "tokenizer.ggml.token_type": [1] * vocabulary.first_special + [3] * len(_SPECIAL),  # normal, control
        "tokenizer.ggml.merges": [" ".join(pair) for pair in vocabulary.merges],
        "tokenizer.ggml.bos_token_id": end_of_text,
        "tokenizer.ggml.eos_token_id": turn_ends,
        "tokenizer.ggml.padding_token_id": end_of_text,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": _CHAT_TEMPLATE,
    }
    if shape.experts:
        facts |= {"llama.expert_count": shape.experts, "llama.expert_used_count": shape.experts_used}
    return facts


def _hf_files(shape: TinyShape, vocabulary: _Vocabulary) -> dict[str, dict[str, Any]]:
    end_of_text, _, turn_ends = range(vocabulary.first_special, shape.vocab)
    ends = {"bos_token_id": end_of_text, "pad_token_id": end_of_text}
    config: dict[str, Any] = {
        "model_type": "mixtral" if shape.experts else "llama",
        "architectures": ["MixtralForCausalLM" if shape.experts else "LlamaForCausalLM"],
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.ffn,
        "vocab_size": shape.vocab,
        "max_position_embeddings": shape.context_tokens,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "eos_token_id": turn_ends,
        **ends,
    }
    if shape.experts:
        config |= {
            "num_local_experts": shape.experts,
            "num_experts_per_tok": shape.experts_used,
            "sliding_window": None,
        }
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": vocabulary.first_special + index, "content": text, **flags, "special": True}
            for index, text in enumerate(_SPECIAL)
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: index for index, token in enumerate(vocabulary.tokens[: vocabulary.first_special])},
            "merges": vocabulary.merges,
        },
    }
    return {
        "config.json": config,
        "generation_config.json": {"eos_token_id": [turn_ends, end_of_text], **ends},
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": _SPECIAL[0],
            "eos_token": _SPECIAL[2],
            "pad_token": _SPECIAL[0],
            "model_max_length": shape.context_tokens,
            "clean_up_tokenization_spaces": False,
            "chat_template": _CHAT_TEMPLATE,
        },
    }
