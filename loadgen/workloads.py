"""The three workloads: how long prompts and answers are, and what users expect of them. Pure.

Lengths are log-normal around a stated mean: most requests are near it, a few are much longer, none is negative. Each
request's lengths depend on its index and the run's seed only, never on which user happens to issue it.
"""

import json
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final

from loadgen.prompts import Calibration, make_prompt, nonce_of, question
from loadgen.tally import SloLimits
from serving.errors import ConfigError
from serving.stream import Api

__all__ = ["WORKLOADS", "RequestMaker", "Workload", "find_workload"]

MEAN_SHARE = 0.6
"""A workload whose mean request fills more of the context than this is scaled down to it."""
CLIP_SHARE = 0.95
"""No single request plans to fill more of the context than this."""
MIN_PROMPT_TOKENS = 16
MIN_OUTPUT_TOKENS = 4
MIN_CONTEXT_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Workload:
    """One kind of traffic.

    Attributes:
        name: as in `WORKLOADS`.
        prompt_tokens: mean prompt length.
        output_tokens: mean answer length.
        prompt_spread: standard deviation of the logarithm of the prompt length.
        output_spread: the same of the answer length.
        slo: what users of this workload expect.
        temperature: sampling temperature sent.
        ignore_eos: ask for the full answer length where the engine can; else answers may end early.
        context_tokens: clip lengths to this context; None does not clip.
    """

    name: str
    prompt_tokens: int
    output_tokens: int
    prompt_spread: float
    output_spread: float
    slo: SloLimits = field(default_factory=SloLimits)
    temperature: float = 0.8
    ignore_eos: bool = True
    context_tokens: int | None = None

    def scaled(
        self, context_tokens: int | None, prompt_tokens: int | None = None, output_tokens: int | None = None
    ) -> "Workload":
        """This workload for a server with that context.

        Args:
            context_tokens: the server's context; None when it is not known.
            prompt_tokens: mean prompt length to use instead of the default.
            output_tokens: mean answer length to use instead of the default.

        Raises:
            ConfigError: lengths that are not positive, or that were asked for and do not fit the context.
        """
        for name, asked, least in (
            ("prompt", prompt_tokens, MIN_PROMPT_TOKENS),
            ("output", output_tokens, MIN_OUTPUT_TOKENS),
        ):
            if asked is not None and asked < least:
                raise ConfigError(f"{name} length must be at least {least} tokens, got {asked}")
        prompt, output = prompt_tokens or self.prompt_tokens, output_tokens or self.output_tokens
        if context_tokens is None:
            return replace(self, prompt_tokens=prompt, output_tokens=output)
        if context_tokens < MIN_CONTEXT_TOKENS:
            raise ConfigError(
                f"a context of {context_tokens} tokens is too small for any workload: at least {MIN_CONTEXT_TOKENS}"
            )
        fixed = (prompt_tokens or 0) + (output_tokens or 0)
        if fixed > CLIP_SHARE * context_tokens:
            raise ConfigError(
                f"prompts of {prompt} and answers of {output} tokens do not fit the context of {context_tokens}: "
                "ask for less, or leave the lengths out to have them scaled"
            )
        room = MEAN_SHARE * context_tokens
        if prompt_tokens is None and output_tokens is None:
            ratio = min(1.0, room / (prompt + output))
            prompt, output = int(prompt * ratio), int(output * ratio)
        else:
            # A length that was asked for stays; the other takes what is left of the room, or half of what would fit.
            left = int(max(room - fixed, (CLIP_SHARE * context_tokens - fixed) / 2))
            prompt = prompt if prompt_tokens is not None else min(prompt, left)
            output = output if output_tokens is not None else min(output, left)
        prompt, output = max(prompt, MIN_PROMPT_TOKENS), max(output, MIN_OUTPUT_TOKENS)
        return replace(self, prompt_tokens=prompt, output_tokens=output, context_tokens=context_tokens)

    def draw(self, index: int, seed: int) -> tuple[int, int]:
        """(prompt tokens, output tokens) of request number `index` in a run with that seed."""
        rng = random.Random(f"{seed}/{index}")
        prompt = _log_normal(rng, self.prompt_tokens, self.prompt_spread, MIN_PROMPT_TOKENS)
        output = _log_normal(rng, self.output_tokens, self.output_spread, MIN_OUTPUT_TOKENS)
        if self.context_tokens is not None:
            limit = int(CLIP_SHARE * self.context_tokens)
            output = min(output, max(MIN_OUTPUT_TOKENS, limit - MIN_PROMPT_TOKENS))
            prompt = min(prompt, limit - output)
        return prompt, output


def _log_normal(rng: random.Random, mean: float, spread: float, least: int) -> int:
    """A draw whose mean is `mean`: the logarithm is centred half its variance below log(mean)."""
    return max(least, round(rng.lognormvariate(math.log(mean) - spread**2 / 2, spread)))


WORKLOADS: Final[Mapping[str, Workload]] = MappingProxyType(
    {
        workload.name: workload
        for workload in (
            Workload("long_document", 24_000, 512, 0.25, 0.25, SloLimits(ttft_seconds=30.0)),
            Workload("interactive", 512, 256, 0.4, 0.4, SloLimits(ttft_seconds=1.5, tpot_seconds=0.060)),
            Workload("offline_batch", 2_000, 512, 0.3, 0.3),
        )
    }
)


def find_workload(name: str) -> Workload:
    """The workload called that, with dashes or underscores.

    Raises:
        ConfigError: there is none.
    """
    workload = WORKLOADS.get(name.strip().lower().replace("-", "_").replace(" ", "_"))
    if workload is None:
        raise ConfigError(f"no workload is called {name!r}: choose one of {', '.join(WORKLOADS)}")
    return workload


@dataclass(frozen=True, slots=True)
class RequestMaker:
    """Makes request bodies of one workload for one model.

    Attributes:
        workload: lengths and sampling.
        calibration: tokens to words.
        model: model name to send.
        api: request form.
        seed: everything that is drawn depends on it.
        run_nonce: 48 bits that tell this run's prompts from those of any other run, whatever the seed.
        ignore_eos: the engine can be asked to give the full answer length.
        shared_prefix: let prompts share their first half.
    """

    workload: Workload
    calibration: Calibration
    model: str
    api: Api
    seed: int
    run_nonce: int
    ignore_eos: bool = True
    shared_prefix: bool = False

    @property
    def full_length(self) -> bool:
        """Answers are to have the planned length exactly."""
        return self.ignore_eos and self.workload.ignore_eos

    def make(self, index: int) -> tuple[bytes, int, int]:
        """(JSON body, planned prompt tokens, planned output tokens) of request number `index`."""
        prompt_tokens, output_tokens = self.workload.draw(index, self.seed)
        words = self.calibration.words_for(prompt_tokens)
        rng = random.Random(f"{self.seed}/{index}/text")
        prompt = make_prompt(rng, words, nonce_of(self.run_nonce, index), shared_prefix=self.shared_prefix)
        body = question(self.model, self.api, prompt, output_tokens) | {
            "temperature": self.workload.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.full_length:
            body["ignore_eos"] = True
        return json.dumps(body).encode(), prompt_tokens, output_tokens
