"""How long an engine step takes: a roofline over one card's share of the model, and a fitted straight line.

The method is the roofline of Williams, Waterman and Patterson (Communications of the ACM 52(4), 2009): an operation
takes as long as its arithmetic or its memory traffic, whichever is longer. A step is a few such operations in turn:

    matrices    max(FLOPs of the weights, bytes of the weights); of experts, those that the step's tokens meet
    attention   of prompts: max(FLOPs, bytes of keys and values); of decoding: bytes of keys and values
    host        experts that stay in main memory: read there by the processor, or copied to the card
    links       two all-reduces for each layer, where cards share layers; hops between pipeline stages
    states      of recurrent layers: each sequence's is read and written, whatever its length
    overhead    launching kernels, scheduling, sampling

A token that meets k of E experts at random leaves each untouched with probability 1 - k/E, so T tokens meet
E (1 - (1 - k/E)^T) of them. That is why decoding alone is fast in a model of experts, and why a batch is less so.

Layers that see a window read no more than it. Prompts expand the latents of latent attention, decoding reads them as
they are; where an indexer chooses tokens, all are counted as read, which is too much for long contexts.

The shares of peak and the overheads are in `Efficiency`; its docstring says what they were set by.
"""

import math
from dataclasses import dataclass, fields

from serving.cards import Card, Host
from serving.errors import ConfigError
from serving.model import ModelShape, Split
from serving.simulator.spec import Work

__all__ = ["Affine", "Efficiency", "Roofline", "Terms"]


@dataclass(frozen=True, slots=True)
class Efficiency:
    """What is reached of the data sheets, and what every step costs besides.

    The defaults reproduce published single-stream decode speeds within a fifth, each in a test of this module: vLLM on
    RTX 4090, A100 and 2 x H100 with dense models of 2 to 72 billion parameters and with Qwen3-30B-A3B, llama.cpp with
    everything on the card, and with three quarters of the experts in main memory. Prefill is set by vLLM's 60 % of peak
    for a dense 72B model, and about half of that for experts, whose matrices are small.

    Attributes:
        bandwidth: share of peak bandwidth reached in reading weights.
        attention_bandwidth: share of it reached in reading keys and values, which lie in scattered blocks.
        compute: share of peak FLOP/s in dense matrices and attention.
        expert_compute: share of peak FLOP/s in experts.
        host_bandwidth: share of main-memory bandwidth reached by the processor in reading experts.
        link_bandwidth: share of peak bandwidth between cards.
        step_seconds: per step, whatever it does.
        layer_seconds: per layer.
        expert_layer_seconds: per layer with experts, on top.
        host_layer_seconds: per layer with experts in main memory, on top: the hand-over to the processor and back.
        collective_seconds: latency of one exchange between cards.
    """

    bandwidth: float = 0.88
    attention_bandwidth: float = 0.6
    compute: float = 0.6
    expert_compute: float = 0.3
    host_bandwidth: float = 0.6
    link_bandwidth: float = 0.7
    step_seconds: float = 700e-6
    layer_seconds: float = 50e-6
    expert_layer_seconds: float = 50e-6
    host_layer_seconds: float = 150e-6
    collective_seconds: float = 12e-6

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name.endswith("_seconds"):
                if value < 0:
                    raise ConfigError(f"{item.name} is {value:g}; it cannot be negative")
            elif not 0 < value <= 1:
                raise ConfigError(f"{item.name} is {value:g}; it must be above 0 and at most 1")


@dataclass(frozen=True, slots=True)
class Terms:
    """What the time of one step is made of. All in seconds.

    Attributes:
        weight_bytes: reading weights from the card's memory.
        matrix_flops: arithmetic with them. Of these two only the longer counts.
        prefill_attention: attention of prompt tokens.
        decode_attention: reading the keys, values and states of decoding sequences.
        host: experts in main memory.
        links: exchange between cards.
        overhead: everything that does not depend on the work.
        distinct_experts: routed experts of one layer that the step's tokens meet; not a time.
    """

    weight_bytes: float
    matrix_flops: float
    prefill_attention: float
    decode_attention: float
    host: float
    links: float
    overhead: float
    distinct_experts: float

    @property
    def total(self) -> float:
        """Seconds for the step."""
        matrices = max(self.weight_bytes, self.matrix_flops)
        attention = self.prefill_attention + self.decode_attention
        return matrices + attention + self.host + self.links + self.overhead

    @property
    def bound(self) -> str:
        """The largest term: `weight_bytes`, `matrix_flops`, `attention`, `host`, `links` or `overhead`."""
        terms = {
            "weight_bytes": self.weight_bytes,
            "matrix_flops": self.matrix_flops,
            "attention": self.prefill_attention + self.decode_attention,
            "host": self.host,
            "links": self.links,
            "overhead": self.overhead,
        }
        return max(terms, key=terms.__getitem__)


class Roofline:
    """A `StepCost` from a model's shape and a card's data sheet.

    With pipeline stages a step stands for one token of every sequence: the stages work at the same time on parts of the
    batch, so arithmetic and attention divide among them as far as there are sequences, while each part reads all the
    weights. With expert parallelism the step waits for the card that most of its experts fell to; of m experts per card
    on average the fullest of n cards has about m + sqrt(2 m ln n).

    Args:
        model: shape of the model, with the bits of its weights. Weights whose activations have 8 bits are multiplied in
            fp8 where the card can; narrower ones are widened first, as engines do.
        card: one of the cards, which are all alike.
        split: how the model is divided over them; None is one card.
        kv_bits: bits of an element of the KV cache.
        host: the machine around the cards.
        host_expert_ratio: share of the expert layers whose experts stay in main memory.
        physical_batch_tokens: tokens that go through the layers at once; a step with more of them reads the weights
            several times. None is without limit.
        efficiency: shares of peak and overheads.

    Raises:
        ConfigError: the model cannot be divided like that, or a ratio is out of range.
    """

    __slots__ = (
        "_compute",
        "_decode_context",
        "_decode_state",
        "_expert_bytes",
        "_expert_parallel",
        "_experts",
        "_fixed_bytes",
        "_head_flops",
        "_host_bytes",
        "_host_compute",
        "_host_copy",
        "_link_latency",
        "_link_token",
        "_log_miss",
        "_overhead",
        "_physical",
        "_pipeline",
        "_prefill_bytes",
        "_prefill_flops",
        "_token_flops",
        "_window",
        "_window_bytes",
        "_window_flops",
    )

    def __init__(
        self,
        model: ModelShape,
        card: Card,
        *,
        split: Split | None = None,
        kv_bits: float = 16.0,
        host: Host | None = None,
        host_expert_ratio: float = 0.0,
        physical_batch_tokens: int | None = None,
        efficiency: Efficiency | None = None,
    ) -> None:
        split = split or Split()
        host = host or Host()
        model.check_split(split)
        if not 0 <= host_expert_ratio <= 1:
            raise ConfigError(f"host_expert_ratio is {host_expert_ratio:g}; it must be between 0 and 1")
        if host_expert_ratio and not model.experts:
            raise ConfigError(f"{model.name} has no experts that could stay in main memory")
        if physical_batch_tokens is not None and physical_batch_tokens < 1:
            raise ConfigError(f"physical_batch_tokens is {physical_batch_tokens}; it must be at least 1")
        reached = efficiency or Efficiency()
        tensor = split.tensor
        cards_of_experts = max(tensor, split.expert)
        bandwidth = card.memory_bandwidth * reached.bandwidth
        wide = model.quantization.activation_bits == 8 and card.fp8_flops is not None
        peak = card.fp8_flops if wide and card.fp8_flops is not None else card.bf16_flops

        # Over all stages: a batch is divided among them, but each part of it reads every stage's weights.
        layout = Split(tensor, 1, split.expert)
        whole, stored = model.on_card(layout), model.weight_bytes(layout)
        head = whole.head or whole.embedding
        self._fixed_bytes = (stored.always_read + (stored.head or stored.embedding)) / bandwidth
        one_expert = model.parameters.experts / max(1, model.experts)
        expert_bytes = model.weight_bytes().experts / max(1, model.experts)
        on_card = 1 - host_expert_ratio
        self._experts = float(model.experts)
        self._expert_parallel = split.expert if split.expert > 1 else 0
        self._expert_bytes = expert_bytes * on_card / (cards_of_experts * bandwidth)
        self._log_miss = 0.0
        if model.experts:
            chosen = model.experts_per_token / model.experts
            self._log_miss = math.log1p(-chosen) if chosen < 1 else -1e9

        self._pipeline = split.pipeline
        used = model.experts_per_token * one_expert / cards_of_experts
        dense = whole.always_read - whole.other
        self._token_flops = 2 * (dense / (peak * reached.compute) + used / (peak * reached.expert_compute))
        self._head_flops = 2 * head / (card.bf16_flops * reached.compute)

        mixers = [layer.mixer for layer in model.layers if layer.mixer is not None]
        read = card.memory_bandwidth * reached.attention_bandwidth
        product = 2 / (card.bf16_flops * reached.compute * tensor)
        endless = [mixer for mixer in mixers if mixer.window is None]
        windowed = [mixer for mixer in mixers if mixer.window is not None]
        self._prefill_flops = product * sum(mixer.prefill_products for mixer in endless)
        self._prefill_bytes = sum(mixer.token_bytes(kv_bits, tensor) for mixer in endless) / read
        self._decode_context = max(self._prefill_bytes, product * sum(mixer.decode_products for mixer in endless))
        self._window = float(max((mixer.window or 0 for mixer in windowed), default=0))
        self._window_flops = product * sum(mixer.prefill_products for mixer in windowed)
        self._window_bytes = sum(mixer.token_bytes(kv_bits, tensor) for mixer in windowed) / read
        self._decode_state = 2 * sum(mixer.state_bytes(tensor, None) for mixer in mixers) / read

        self._host_bytes = expert_bytes * host_expert_ratio / (host.memory_bandwidth * reached.host_bandwidth)
        self._host_copy = expert_bytes * host_expert_ratio / host.pcie_bandwidth
        self._host_compute = 2 * model.experts_per_token * one_expert * host_expert_ratio / host.flops

        self._physical = float(physical_batch_tokens or math.inf)
        self._link_latency = self._link_token = 0.0
        link = card.link_bandwidth * reached.link_bandwidth
        if tensor > 1:
            self._link_latency = 2 * len(model.layers) * reached.collective_seconds
            self._link_token = 2 * len(model.layers) * 2 * (tensor - 1) / tensor * 2 * model.hidden / link
        self._link_latency += (split.pipeline - 1) * reached.collective_seconds
        self._link_token += (split.pipeline - 1) * 2 * model.hidden / link
        self._overhead = (
            reached.step_seconds
            + reached.layer_seconds * len(model.layers)
            + reached.expert_layer_seconds * model.expert_layers
            + reached.host_layer_seconds * model.expert_layers * host_expert_ratio
        )

    def seconds(self, work: Work) -> float:
        """Seconds for one step, as `spec.StepCost` has it."""
        prefill = work.prefill_tokens
        decoding = work.decode_sequences
        tokens = prefill + decoding
        passes = 1.0
        if tokens > self._physical:
            passes = float(-(-tokens // self._physical))
        weights = self._fixed_bytes * passes
        flops = self._token_flops * tokens + self._head_flops * (decoding or 1)
        seconds = self._overhead + self._link_latency * passes + self._link_token * tokens
        if self._log_miss:
            met = -self._experts * math.expm1(self._log_miss * (tokens / passes))
            if self._host_copy:
                host = max(self._host_bytes * met * passes, self._host_compute * tokens)
                copied = self._host_copy * met * passes
                seconds += min(host, copied)
            if self._expert_parallel:
                met = self._fullest(met)
            weights += self._expert_bytes * met * passes
        attention = self._prefill_attention(work)
        decode = self._decode_attention(work)
        if self._pipeline > 1:
            flops /= self._pipeline
            attention /= self._pipeline
            decode /= min(self._pipeline, decoding or 1)
        return seconds + max(flops, weights) + attention + decode

    def terms(self, work: Work) -> Terms:
        """What `seconds` is made of; their total is the same but for rounding."""
        tokens = work.prefill_tokens + work.decode_sequences
        passes = max(1.0, float(-(-tokens // self._physical)))
        stages = self._pipeline
        met = host = 0.0
        if self._log_miss:
            met = -self._experts * math.expm1(self._log_miss * (tokens / passes))
            there = max(self._host_bytes * met * passes, self._host_compute * tokens)
            host = min(there, self._host_copy * met * passes)
        prefill = self._prefill_attention(work)
        read = self._fullest(met) if self._expert_parallel and met else met
        flops = self._token_flops * tokens + self._head_flops * (work.decode_sequences or 1)
        return Terms(
            weight_bytes=(self._fixed_bytes + self._expert_bytes * read) * passes,
            matrix_flops=flops / stages,
            prefill_attention=prefill / stages,
            decode_attention=self._decode_attention(work) / min(stages, work.decode_sequences or 1),
            host=host,
            links=self._link_latency * passes + self._link_token * tokens,
            overhead=self._overhead,
            distinct_experts=met,
        )

    def _prefill_attention(self, work: Work) -> float:
        """Seconds for attention of prompts, on one card of one stage after the other."""
        tokens, context = work.prefill_tokens, work.prefill_context_tokens
        if not tokens:
            return 0.0
        seconds = max(context * self._prefill_flops, context / tokens * self._prefill_bytes)
        if self._window:
            near = min(context, tokens * self._window)
            seconds += max(near * self._window_flops, near / tokens * self._window_bytes)
        return seconds

    def _decode_attention(self, work: Work) -> float:
        """Seconds for reading what decoding sequences left in the cache, on one card of one stage after the other."""
        seconds = work.decode_context_tokens * self._decode_context + work.decode_sequences * self._decode_state
        if self._window:
            near = min(work.decode_context_tokens, work.decode_sequences * self._window)
            seconds += near * max(self._window_bytes, self._window_flops)
        return seconds

    def _fullest(self, met: float) -> float:
        """Experts to count as read when the step waits for the card with most of them."""
        cards = self._expert_parallel
        mean = met / cards
        fullest = mean + math.sqrt(2 * mean * math.log(cards))
        return min(fullest, met, self._experts / cards) * cards


@dataclass(frozen=True, slots=True)
class Affine:
    """A `StepCost` with fitted coefficients, for engines whose machine is in no table. All in seconds.

    Attributes:
        fixed_seconds: per step.
        prefill_token_seconds: per prompt token.
        prefill_context_seconds: per token of context that a prompt token attends to.
        decode_sequence_seconds: per sequence that gets a token.
        decode_context_seconds: per token in the KV cache of such a sequence.
    """

    fixed_seconds: float
    prefill_token_seconds: float = 0.0
    prefill_context_seconds: float = 0.0
    decode_sequence_seconds: float = 0.0
    decode_context_seconds: float = 0.0

    def __post_init__(self) -> None:
        for item in fields(self):
            if not getattr(self, item.name) >= 0:
                raise ConfigError(f"{item.name} is {getattr(self, item.name):g}; a step cannot take less than no time")
        if not (self.fixed_seconds or (self.prefill_token_seconds and self.decode_sequence_seconds)):
            raise ConfigError("fixed_seconds is 0 and so is a step of one token; every step takes some time")

    def seconds(self, work: Work) -> float:
        """Seconds for one step, as `spec.StepCost` has it."""
        return (
            self.fixed_seconds
            + self.prefill_token_seconds * work.prefill_tokens
            + self.prefill_context_seconds * work.prefill_context_tokens
            + self.decode_sequence_seconds * work.decode_sequences
            + self.decode_context_seconds * work.decode_context_tokens
        )
