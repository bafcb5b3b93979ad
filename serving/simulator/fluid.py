"""Fluid mode: the simulated server as rates over seconds, for months of virtual time.

Token mode takes every step; here a request is one of many. What a step costs comes from the same `StepCost`, so the
same specification gives the same throughput, batch, KV cache and memory, and a test holds both modes together.

Requests inside are a birth-death process: they arrive at the traffic's rate, and each of `n` that run leaves after a
residence that depends on `n`. Where nothing binds, its transition over any time is that of M/M/infinity (those still
there are binomial, newcomers still there Poisson, or negative binomial as far as a larger batch is a slower one), so
that a sample costs one draw however long ago the last one was. Near a limit, time is cut into parts of a residence.
Series therefore have the variance and the memory of a queue, and are no smoother than real ones.

A residence is the prompt's steps, then one step a token. A step with prompts in it takes longer. How many meet in one
is Poisson; prompts longer than the token budget come in full chunks, one a step. What this leaves out is which request
is which: all that run are alike, so that stuck requests and zombies are shares, and the order in the queue is unknown.
"""

import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

from serving.clock import NS
from serving.simulator.faults import Conditions, FaultPlan
from serving.simulator.life import Life
from serving.simulator.spec import Finish, OnFull, ServerSpec, Work
from serving.simulator.traffic import Traffic

__all__ = ["FluidServer"]

MAX_STEP_SECONDS = 15.0
"""Longer than this nothing is taken as constant, not even the traffic."""
NO_LIMIT = 1_000_000
BUNCHED = 1.4
"""Prompts that meet wait for each other while the rest stands still, so that they weigh more; fitted on token mode."""
CLUMP = 1.25
CLUMP_AGAIN = 0.7
"""Prompts that are let in together where the KV cache binds: small ones behind a large one, and those thrown out
together; fitted on token mode."""
YOUNG = 0.15
"""Tokens that the youngest request has when it is thrown out, over the mean of all that run; fitted on token mode."""
_COMPLETIONS = "/v1/completions"
_RATE_STEPS = 40
"""Rates are told apart in steps of 1/40 of their logarithm, so that what follows from them is worked out once."""


class FluidServer(Life):
    """A server in fluid mode, with its customers. KV blocks and counters of tokens are averages with fractions.

    Args:
        spec: as it was started.
        traffic: what customers ask; None leaves it idle.
        edges: histogram edges by canonical signal, as the dialect has them.
        t_ns: when it is launched; it is ready at once, or after `spec.start_seconds` with `cold`.
        seed: everything that is drawn depends on it.
        plan: faults; none by default. May be changed while the server runs.
        cold: whether the first start takes its time.
    """

    longest_step_ns = round(MAX_STEP_SECONDS * NS)

    def __init__(
        self,
        spec: ServerSpec,
        *,
        traffic: Traffic | None,
        edges: Mapping[str, tuple[float, ...]] | None = None,
        t_ns: int,
        seed: int = 0,
        plan: FaultPlan | None = None,
        cold: bool = False,
    ) -> None:
        self.traffic = traffic if traffic is not None else Traffic(0.0)
        self._rng = random.Random(f"{seed}/fluid")
        self._kv_total = spec.kv_blocks - spec.policy.reserved_blocks
        self._leaked_blocks = 0.0
        self._speed = _Speed(spec, _lengths(self.traffic, spec))
        super().__init__(spec, t_ns=t_ns, edges=edges, plan=plan, cold=cold)

    def _begin_anew(self, *, keeps_leaks: bool) -> None:
        if not keeps_leaks:
            self._leaked_blocks = 0.0
        self._running = self._waiting = self._stuck = 0
        self._passing = 0
        """Requests that wait for no more than the next step."""
        self._progress = 0.0
        """Tokens that one running request has generated, on average over all."""
        self._inflow = 0.0
        """How far above their rate prompts came in the last residence or so, requests per second."""
        self._owed = 0.0
        """Requests that left without all their tokens having been counted."""
        self._drift = 0.0
        """How far the contexts of those that run are from the mean now, in standard deviations of their sum."""
        self._filled: float | None = None
        """KV blocks that those that run hold for themselves, where the cache binds."""
        self._busy_ratio = 0.0

    # ---- life

    def run_until(self, t_ns: int) -> None:
        """Let everything up to `t_ns` happen."""
        self.elapse(t_ns)

    def _lose_all(self) -> None:
        self.finished[Finish.DIED] += self._running + self._waiting + self._stuck
        self._running = self._waiting = self._stuck = 0

    def _pass(self, conditions: Conditions, seconds: float) -> bool:
        if not self.ready:
            self.finished[Finish.DIED] += _poisson(self._rng, self.traffic.rate(self._now_ns) * seconds)
            return False
        self._serve(conditions, seconds)
        return self._running + self._stuck > 0

    # ---- requests

    def _serve(self, conditions: Conditions, seconds: float) -> None:
        """Serve for that long while nothing but the batch changes."""
        traffic, speed = self.traffic, self._speed
        lengths = _lengths(traffic, self.spec, conditions.zombie_share)
        speed.set(lengths, self._factor(conditions), conditions.decode_factor(self._seconds(self._now_ns)))
        asked = traffic.rate(self._now_ns + round(seconds / 2 * NS))
        rate = asked * lengths.accepted_share
        tally = _Tally(rejected=_poisson(self._rng, (asked - rate) * seconds))
        rest = seconds
        while rest > 1e-9:
            rest -= self._advance(tally, lengths, conditions, rate, rest)
        self._book(tally, lengths, conditions, seconds)

    def _advance(
        self, tally: "_Tally", lengths: "_Lengths", conditions: Conditions, rate: float, seconds: float
    ) -> float:
        """Let requests come and go for at most that long; returns for how long it was."""
        rng, spec, speed = self._rng, self.spec, self._speed
        running, waiting = self._running, self._waiting
        limit, kv_bound = self._limit(conditions)
        preempts = kv_bound and waiting and spec.policy.on_full is OnFull.PREEMPT
        speed.again = lengths.preemptions if preempts and not spec.policy.reserved_output_ratio else 0.0
        speed.clump = CLUMP + CLUMP_AGAIN * speed.again if kv_bound and waiting else 1.0

        rest, tie = speed.rest(rate, limit)
        room = 4 * math.sqrt((max(rest, running) + 1) / (1 - tie))
        is_free = not waiting and max(rest, running) + room < limit
        if is_free:
            point = speed.at(rest + 1, rate)
        else:
            if not waiting:
                flow = rate
            elif running >= limit or kv_bound:
                flow = speed.most(limit)
            else:
                # There is room, so it is the token budget that keeps them waiting: every step is full.
                flow = NO_LIMIT
            point = speed.at(max(1.0, running), flow)
            # While so many wait that they will not all be gone, the batch stays full, and time may pass faster.
            leaves = running / point.residence_seconds
            by_chance = (waiting / 3) ** 2 / max(2 * (rate + leaves), 1e-9)
            by_trend = waiting / max(2 * (leaves - rate), 1e-9)
            longest = max(point.residence_seconds / 8, min(by_chance, by_trend))
            seconds = min(seconds, longest)
        x = seconds / point.residence_seconds
        slowed = 1.0
        came = 0
        if not is_free or x <= 0.7:
            came = _poisson(rng, rate * seconds)

        if is_free and x > 0.7:
            # What survives is binomial and what is new negative binomial, so that mean and variance of the batch are
            # those of the process at rest, and it goes back to rest as fast.
            stays = math.exp(-x * (1 - tie))
            dispersion = (1 + BUNCHED * point.elasticity) / (1 - tie)
            survived = _binomial(rng, running, stays)
            expected = rest * (1 - stays)
            stayed = _dispersed(rng, expected, dispersion * (1 + stays) - stays)
            # Those who came and left again vary less by as much, so that all who came are Poisson.
            passed_by = max(1e-9, rate * seconds - expected)
            less = math.sqrt(max(0.0, 1 - expected * (dispersion - 1) * (1 + stays) / passed_by))
            passing = _leaving(rng, passed_by, less)
            admitted = came = stayed + passing
            after = survived + stayed
            left = running - survived + passing
            mean = rest + ((running + after) / 2 - rest) * (1 - stays) / (x * (1 - tie))
            point = speed.at(mean - math.expm1(-x), rate)
            area = left * point.residence_seconds
            idle = _idle(rest, running, x, dispersion)
        elif is_free:
            # Those that run meet the batch as it is, newcomers as it will be, and themselves.
            back = x * (1 - tie)
            kept = -math.expm1(-back) / back
            point = speed.at(rest + (running - rest) * kept - math.expm1(-x), rate)
            slowed = self._slowed(point, rate, rest)
            x = seconds / (point.residence_seconds * slowed)
            stays = math.exp(-x)
            admitted = came
            after = _binomial(rng, running, stays) + _binomial(rng, came, (1 - stays) / x)
            left = running + came - after
            area = (running + after) / 2 * seconds
            idle = _idle(rest, running, x, (1 + point.elasticity) / (1 - tie))
        else:
            if not waiting:
                slowed = self._slowed(point, rate, rest)
                x /= slowed
            may_come = waiting + came
            if waiting or rate > 0.7 * point.most_per_second:
                may_come = min(may_come, _round(rng, point.most_per_second * seconds))
            if waiting or running + may_come > limit:
                # Who leaves is replaced at once.
                left = min(running + may_come, _leaving(rng, running * x, lengths.output_variation))
                admitted = max(0, min(may_come, limit - running + left))
            else:
                stays = math.exp(-x)
                admitted = may_come
                left = running + admitted - _binomial(rng, running, stays) - _binomial(rng, admitted, (1 - stays) / x)
            after = running + admitted - left
            waiting += came - admitted
            if after > limit:
                waiting += after - limit
                after = limit
            if spec.queue_limit is not None and waiting > spec.queue_limit:
                # Who was thrown out comes back to the queue, however long it is.
                refused = min(waiting - spec.queue_limit, came)
                tally.rejected += refused
                came -= refused
                waiting -= refused
            area = (running + after) / 2 * seconds
            idle = 0.0 if running or after else 1.0

        fade = math.exp(-seconds / point.residence_seconds)
        if rate:
            noise = (came - rate * seconds) / math.sqrt(rate * seconds) * math.sqrt(1 + lengths.prompt_variation**2)
            self._inflow *= fade
            self._inflow += noise * math.sqrt(rate / (2 * point.residence_seconds) * (1 - fade * fade))
        self._drift = self._drift * fade + math.sqrt(1 - fade * fade) * rng.gauss(0, 1)
        self._progress += (lengths.progress - self._progress) * -math.expm1(
            -seconds / (lengths.progress * point.token_seconds)
        )

        queue = (self._waiting + waiting) / 2
        wait = (point.step_wait_seconds if queue else point.wait_seconds) * (1 - idle)
        self._passing = _poisson(rng, rate * (wait - point.step_wait_seconds * (1 - idle)))
        out = 0.0
        if queue:
            through = limit / speed.at(limit, flow).residence_seconds if limit > 0 else 0.0
            through = max(1e-3, min(through, point.most_per_second))
            # Who is thrown out waits for others to end, and behind those who were thrown out after it.
            out = min(speed.again**2, queue) / through
            wait += queue / through - out
        self._running, self._waiting = after, waiting

        # Tokens come out while requests run, but neither more nor fewer than those that left have had.
        passed = area / point.residence_seconds
        self._owed += left - passed
        paid = max(-passed, self._owed * (1 - fade))
        self._owed -= paid
        tally.add(point, seconds * (1 - idle), came, admitted, left, passed + paid, wait, slowed)
        tally.throw_out(point, left, passed + paid, speed.again, out)
        tally.batch_seconds += area
        self.memory.work(after + self._stuck, 0.0)
        if spec.policy.on_full is OnFull.FAIL and self._kv_blocks() >= self._kv_total:
            self.finished[Finish.KV_FULL] += self._running + self._stuck
            self._running = self._stuck = 0
            self._progress = self._owed = 0.0
        return seconds

    def _slowed(self, point: "_Point", rate: float, rest: float) -> float:
        """How many times as long requests stay because more prompts came lately than their rate says."""
        if not rate:
            return 1.0
        weight = BUNCHED * point.elasticity
        # A request is itself among those that came, which must not make it stay longer.
        own = weight * math.sqrt(1 + self._speed.lengths.prompt_variation**2) / (2 * max(1.0, rest))
        return max(0.3, 1 + weight * self._inflow / rate) / (1 + own)

    def _book(self, tally: "_Tally", lengths: "_Lengths", conditions: Conditions, seconds: float) -> None:
        """Count what happened in that time."""
        rng, policy = self._rng, self.spec.policy
        admitted, left = tally.admitted, tally.left
        taken = _gamma(rng, admitted * lengths.prompt_tokens, admitted, lengths.prompt_variation)
        generated = tally.passed * lengths.output_tokens
        self.prompt_tokens += taken
        self.cached_tokens += taken * lengths.cached_tokens / lengths.prompt_tokens
        if policy.counts_at_finish:
            self.generated_tokens += _gamma(rng, left * lengths.output_tokens, left, lengths.output_variation)
        else:
            self.generated_tokens += generated
        self.memory.host_leaked += conditions.host_leak_bytes_per_token * generated
        self.memory.gpu_leaked += conditions.gpu_leak_bytes_per_request * left
        self.http[_COMPLETIONS, 200] += tally.came
        self.http[_COMPLETIONS, 503] += tally.rejected
        self.finished[Finish.REJECTED] += tally.rejected

        busy = tally.busy_seconds
        self._busy_ratio = busy / seconds
        self.preemptions += tally.again
        self.steps += tally.steps
        self.step_tokens += generated + (admitted + tally.again) * lengths.uncached_tokens
        self.step_tokens += tally.again * (YOUNG * self._progress + lengths.cached_tokens)
        in_prompts = min(busy, tally.prompt_seconds)
        alone = 1.0 if policy.prefill_first else math.exp(-tally.batch_seconds / seconds)
        self.prefill_seconds += in_prompts
        self.decode_seconds += busy - in_prompts * alone

        ended = left
        if conditions.stuck_share and admitted:
            stuck = _binomial(rng, admitted, conditions.stuck_share)
            still_here = min(stuck, self._running)
            # The rest would have been counted as having left.
            room = self._batch_limit(conditions) - self._stuck - self._running
            ended -= max(0, min(stuck - still_here, left, room))
            self._running -= still_here
            self._stuck += still_here + left - ended
        gone = _binomial(rng, ended, lengths.cancelled_share)
        self.finished[Finish.CANCELLED] += gone
        self.finished[Finish.STOP] += ended - gone
        if gone and conditions.kv_leak_blocks_per_disconnect:
            lost = gone * conditions.kv_leak_blocks_per_disconnect
            self._leaked_blocks = min(float(self._kv_total), self._leaked_blocks + lost)

        inside = self._running + self._stuck
        tokens = float(inside)
        if admitted:
            prompt = min(lengths.prompt_at(rng.random() ** (1 / admitted)), self.spec.context_tokens)
            meet = _largest_poisson(tally.prompts_per_step, rng.random() / max(1.0, tally.steps))
            # The longest prompt and the fullest step seldom fall together.
            tokens += prompt + max(0, meet - 1) * lengths.uncached_tokens / 2
            self._observe(
                "time_to_first_token_seconds", tally.first_sum, 0.1 + 0.8 * lengths.prompt_variation, admitted
            )
            self._observe("request_queue_seconds", tally.wait_sum, 0.5, admitted)
        self.memory.work(inside, min(tokens, self.spec.token_budget))
        if left:
            longest = min(lengths.total_at(rng.random() ** (1 / left)), self.spec.context_tokens)
            self.longest_tokens = max(self.longest_tokens, longest)
            spread = 0.05 + tally.decode_sum / tally.whole_sum * lengths.output_variation
            self._observe("request_duration_seconds", tally.whole_sum, spread, left)
        gaps = max(0.0, lengths.output_tokens - 1)
        self._observe("inter_token_latency_seconds", tally.early_sum * gaps, 0.1, tally.early * gaps)
        self._observe("inter_token_latency_seconds", tally.late_sum * gaps, 0.1, tally.late * gaps)
        self._observe("inter_token_latency_seconds", tally.thrown_sum, 1.0, tally.thrown)

    def _observe(self, signal: str, total: float, spread: float, times: float) -> None:
        """Count observations with that sum whose distribution is log-normal."""
        counter = self.histograms.get(signal)
        if counter is None or times <= 0:
            return
        mean = max(total / times, 1e-6)
        counts = counter.counts
        for index, share in _shares(self._edges[signal], round(math.log(mean) * 40), round(spread * 20)):
            counts[index] += share * times
        counter.sum += total

    # ---- the batch's limits

    def _batch_limit(self, conditions: Conditions) -> int:
        return NO_LIMIT if conditions.limit_ignored else self.spec.max_batch

    def _limit(self, conditions: Conditions) -> tuple[int, bool]:
        """How many can run (those that are stuck not counted), and whether it is the KV cache that says so."""
        spec, lengths = self.spec, self._speed.lengths
        limit = self._batch_limit(conditions) - self._stuck
        each = self._blocks_each(max(1, self._running))
        reserve = spec.policy.reserved_output_ratio
        head = min(lengths.queue_head_tokens, spec.token_budget)
        if reserve:
            each += reserve * lengths.progress / spec.block_tokens
            head += reserve * lengths.output_tokens
        free = self._kv_total - self._leaked_blocks - self._stuck_blocks() - lengths.common_blocks(self._running)
        # Between two admissions what is free is anything up to what the next request needs.
        free = max(0.0, free - self._rng.random() * head / spec.block_tokens)
        fits = _round(self._rng, free / each)
        self._filled = None
        if fits >= limit:
            return max(0, limit), False
        if self._waiting:
            self._filled = free - fits * reserve * lengths.progress / spec.block_tokens
        return fits, True

    def _blocks_each(self, running: float) -> float:
        """KV blocks that one running request holds for itself, on average over those that run now."""
        lengths, size = self._speed.lengths, self.spec.block_tokens
        spread = lengths.context_deviation * self._drift / math.sqrt(running)
        decoding = lengths.decode_prompt_tokens + self._progress + spread
        share = self._speed.decode_share
        tokens = share * max(1.0, decoding) + (1 - share) * lengths.prefill_tokens_held
        return max(1.0, (tokens + (size - 1) / 2) / size - lengths.shared_blocks)

    def _stuck_blocks(self) -> float:
        lengths = self._speed.lengths
        return self._stuck * (lengths.prompt_tokens + lengths.output_tokens / 2) / self.spec.block_tokens

    def _kv_blocks(self) -> float:
        used = self._leaked_blocks + self._stuck_blocks()
        if self._running:
            used += self._speed.lengths.common_blocks(self._running)
            each = self._blocks_each(self._running)
            used += self._filled if self._filled is not None else self._running * each
        return min(used, float(self._kv_total))

    # ---- what is seen

    def _gauges(self) -> tuple[float, float, float]:
        waiting = self._waiting + self._passing
        if self.spec.queue_limit is not None:
            waiting = min(waiting, self.spec.queue_limit)
        return self._running + self._stuck, waiting, self._kv_blocks()

    def _inside(self) -> tuple[int, int]:
        return self._running + self._stuck, self._waiting

    def _busy(self) -> float:
        return self._busy_ratio


@dataclass(slots=True)
class _Tally:
    """What happened in one stretch of time.

    Sums are over requests or, for `early` and `late`, over requests' worth of tokens: those that came after a step
    without prompts, and after one with some. `thrown` is the number of gaps in which a request was out of the batch.
    """

    rejected: int = 0
    came: int = 0
    admitted: int = 0
    left: int = 0
    passed: float = 0.0
    """Requests' worth of tokens."""
    again: float = 0.0
    """Prompts computed once more."""
    steps: float = 0.0
    busy_seconds: float = 0.0
    prompt_seconds: float = 0.0
    batch_seconds: float = 0.0
    wait_sum: float = 0.0
    first_sum: float = 0.0
    decode_sum: float = 0.0
    whole_sum: float = 0.0
    early: float = 0.0
    early_sum: float = 0.0
    late: float = 0.0
    late_sum: float = 0.0
    thrown: float = 0.0
    thrown_sum: float = 0.0
    prompts_per_step: float = 0.0

    def add(
        self,
        point: "_Point",
        busy: float,
        came: int,
        admitted: int,
        left: int,
        passed: float,
        wait: float,
        slowed: float,
    ) -> None:
        """Count a shorter stretch, in which the server was busy for that long and as fast as `point` says."""
        self.came += came
        self.admitted += admitted
        self.left += left
        self.passed += passed
        self.steps += max(0.0, busy - admitted * point.delay_seconds) / point.base_seconds
        self.steps += admitted * point.prompt_steps
        self.busy_seconds += busy
        self.prompt_seconds += admitted * point.prompt_seconds
        whole = point.residence_seconds * slowed
        self.wait_sum += admitted * wait
        self.first_sum += admitted * (wait + point.first_seconds)
        self.decode_sum += left * (whole - point.first_seconds)
        self.whole_sum += left * (wait + whole)
        late = passed * min(1.0, point.late_ratio * slowed)
        self.early += passed - late
        self.early_sum += (passed - late) * point.base_seconds
        self.late += late
        self.late_sum += late * point.late_seconds
        self.prompts_per_step = max(self.prompts_per_step, point.prompts_per_step)

    def throw_out(self, point: "_Point", left: int, passed: float, again: float, out: float) -> None:
        """Requests were thrown out `again` times each and waited for `out` seconds in all to come back."""
        if not again:
            return
        prompts = left * again
        self.again += prompts
        self.steps += prompts * (point.prompt_steps - point.delay_seconds / point.base_seconds)
        self.prompt_seconds += prompts * point.prompt_seconds
        self.whole_sum += left * out
        self.thrown += passed * again
        self.thrown_sum += passed * (again * point.token_seconds + out)


@dataclass(frozen=True, slots=True)
class _Lengths:
    """What is known of the requests of one kind of traffic that a server accepts. Means over requests, unless said.

    Attributes:
        accepted_share: share of all that fit the context.
        prompt_tokens: whole prompts.
        prompt_variation: standard deviation of prompt lengths over their mean.
        prompt_spread: the same of their logarithm.
        uncached_tokens: prompt tokens that are not found in the prefix cache.
        prefill_context: sum over those of the context that each attends to.
        cached_tokens: the rest of the prompt.
        shared_blocks: KV blocks that a request holds together with others.
        prefix_blocks: blocks of the common prefix.
        prefix_share: share of requests that begin with it.
        output_tokens: tokens generated; fewer than planned where the client goes away.
        output_variation: their standard deviation over their mean.
        decode_context: KV tokens of a sequence that gets a token, mean over tokens.
        context_deviation: its standard deviation.
        decode_prompt_tokens: the prompt's part in it.
        progress: the part in it that was generated.
        queue_head_tokens: prompt at the head of a queue that waits for KV blocks, where longer ones stay longer.
        prefill_tokens_held: KV tokens of a request while its prompt is processed.
        cancelled_share: share of requests whose client goes away.
        preemptions: how often a request is thrown out while the KV cache binds.
    """

    accepted_share: float
    prompt_tokens: float
    prompt_variation: float
    prompt_spread: float
    uncached_tokens: float
    prefill_context: float
    cached_tokens: float
    shared_blocks: float
    prefix_blocks: float
    prefix_share: float
    output_tokens: float
    output_variation: float
    decode_context: float
    context_deviation: float
    decode_prompt_tokens: float
    progress: float
    queue_head_tokens: float
    prefill_tokens_held: float
    cancelled_share: float
    preemptions: float

    def common_blocks(self, running: float) -> float:
        """KV blocks that those that run hold together."""
        if not self.prefix_blocks:
            return 0.0
        return self.prefix_blocks * -math.expm1(-running * self.prefix_share)

    def prompt_at(self, quantile: float) -> float:
        """Length of the part of a prompt that is processed, at that quantile."""
        return self.uncached_tokens * _log_normal_at(quantile, self.prompt_spread)

    def total_at(self, quantile: float) -> float:
        """Prompt and output together at that quantile: the longer one makes the tail."""
        prompt = self.prompt_tokens * _log_normal_at(quantile, self.prompt_spread) + self.output_tokens
        spread = math.sqrt(math.log1p(self.output_variation**2))
        return max(prompt, self.prompt_tokens + self.output_tokens * _log_normal_at(quantile, spread))


def _lengths(traffic: Traffic, spec: ServerSpec, zombie_share: float = 0.0) -> _Lengths:
    """What that server accepts of that traffic. Zombies are a share of those whose client goes away."""
    return _integrate(
        traffic, spec.context_tokens, spec.block_tokens, spec.token_budget, spec.prefix_cache, zombie_share
    )


@lru_cache(maxsize=64)
def _integrate(
    traffic: Traffic,
    context_tokens: int,
    block_tokens: int,
    token_budget: int,
    prefix_cache: bool,
    zombie_share: float,
) -> _Lengths:
    """Integrate over the traffic's distribution of lengths."""
    total = prompts = prompts2 = heads = uncached = prefill = cached = shared = 0.0
    outputs = outputs2 = gone = tokens = contexts = contexts2 = contexts_prompt = 0.0
    prefix_share = traffic.shared_prefix_share if prefix_cache else 0.0
    prefix_blocks = traffic.shared_prefix_tokens // block_tokens
    leaves = traffic.disconnect_share * (1 - zombie_share)
    for prompt_z, prompt_weight in _normal(traffic.prompt_spread):
        for output_z, output_weight in _normal(traffic.output_spread):
            prompt = max(1.0, traffic.prompt_tokens * prompt_z)
            output = max(1.0, traffic.output_tokens * output_z)
            if traffic.context_tokens is not None:
                output = min(output, traffic.context_tokens - 1)
                prompt = min(prompt, traffic.context_tokens - output)
            room = context_tokens - prompt
            known = min((prompt - 1) // block_tokens, prefix_blocks)
            # A client that goes away does so anywhere in the answer: the first three moments of an even distribution.
            most = min(output, room)
            cases = (
                (1 - leaves, float(output <= room), output, output**2, output**3),
                (
                    leaves,
                    max(0.0, most / output),
                    (most + 1) / 2,
                    (most + 1) * (2 * most + 1) / 6,
                    most * (most + 1) ** 2 / 4,
                ),
            )
            for share, fits, mean, mean2, mean3 in cases:
                weight = prompt_weight * output_weight * share * fits
                if weight <= 0:
                    continue
                total += weight
                prompts += weight * prompt
                prompts2 += weight * prompt**2
                heads += weight * min(prompt, token_budget)
                outputs += weight * mean
                outputs2 += weight * mean2
                for part, hit in ((weight * (1 - prefix_share), 0.0), (weight * prefix_share, known * block_tokens)):
                    new = prompt - hit
                    uncached += part * new
                    cached += part * hit
                    prefill += part * (new * hit + new * (new + 1) / 2)
                shared += weight * prefix_share * known
                tokens += weight * (mean - 1)
                contexts += weight * (prompt * (mean - 1) + (mean2 - mean) / 2)
                contexts_prompt += weight * prompt * (mean - 1)
                contexts2 += weight * (
                    prompt**2 * (mean - 1) + prompt * (mean2 - mean) + (2 * mean3 - 3 * mean2 + mean) / 6
                )
            gone += prompt_weight * output_weight * traffic.disconnect_share * max(0.0, most / output)
    if not total:
        # Nothing fits the context: no request will ever be asked for these.
        total = prompts = prompts2 = heads = uncached = prefill = outputs = outputs2 = 1e-12
    prompt = prompts / total
    output = outputs / total
    context = contexts / tokens if tokens else prompt + 1
    at_prompt = contexts_prompt / tokens if tokens else prompt
    head = prompts2 / prompts
    # What a request grows by over what it was let in with. Prompts that are let in for their first chunk only are
    # thrown out several times before they are through.
    growth = (2.5 * (prompts - heads) + outputs) / heads
    return _Lengths(
        accepted_share=min(1.0, total) if total > 1e-9 else 0.0,
        prompt_tokens=prompt,
        prompt_variation=math.sqrt(max(0.0, prompts2 / total / prompt**2 - 1)),
        prompt_spread=traffic.prompt_spread,
        uncached_tokens=uncached / total,
        prefill_context=prefill / total,
        cached_tokens=cached / total,
        shared_blocks=shared / total,
        prefix_blocks=prefix_blocks if shared else 0.0,
        prefix_share=prefix_share,
        output_tokens=output,
        output_variation=math.sqrt(max(0.0, outputs2 / total / output**2 - 1)),
        decode_context=context,
        context_deviation=math.sqrt(max(0.0, contexts2 / tokens - context**2)) if tokens else 0.0,
        decode_prompt_tokens=at_prompt,
        progress=max(1.0, context - at_prompt),
        queue_head_tokens=head,
        prefill_tokens_held=prompt,
        cancelled_share=min(1.0, gone / total),
        # Fitted on token mode, outputs from a fifth to four times the prompt.
        preemptions=growth / (1 + 0.14 * growth),
    )


def _normal(spread: float) -> Iterator[tuple[float, float]]:
    """(length over its mean, weight) for a log-normal length: the trapezoid rule, exact to all digits that matter."""
    if not spread:
        yield 1.0, 1.0
        return
    step = 0.25
    for index in range(-20, 21):
        z = index * step
        yield math.exp(spread * z - spread**2 / 2), math.exp(-z * z / 2) * step / math.sqrt(math.tau)


@dataclass(frozen=True, slots=True)
class _Point:
    """How fast a batch of one size is, while prompts come at one rate.

    Attributes:
        token_seconds: mean time between two tokens of one sequence.
        base_seconds: the same where no prompt is in the way.
        delay_seconds: by how much one prompt delays all that run.
        prompt_seconds: time in steps with prompts, for each prompt.
        prompt_steps: steps for each prompt in which nobody gets a token.
        first_seconds: from admission to the first token.
        residence_seconds: from admission to the last token.
        elasticity: by what share residences grow with the rate of prompts, in logs.
        step_wait_seconds: from arrival to the next step.
        wait_seconds: from arrival to the step that admits, where nothing binds but the token budget now and then.
        most_per_second: requests a second whose prompts fill the token budget.
        prompts_per_step: mean number of prompts that begin in a step.
        late_ratio: share of the tokens that come after a step with prompts.
        late_seconds: time between two tokens then.
    """

    token_seconds: float
    base_seconds: float
    delay_seconds: float
    prompt_seconds: float
    prompt_steps: float
    first_seconds: float
    residence_seconds: float
    elasticity: float
    step_wait_seconds: float
    wait_seconds: float
    most_per_second: float
    prompts_per_step: float
    late_ratio: float
    late_seconds: float


class _Speed:
    """Looks up and remembers how fast the server is, for one set of factors at a time."""

    def __init__(self, spec: ServerSpec, lengths: _Lengths) -> None:
        self._spec = spec
        self.lengths = lengths
        self.again = 0.0
        """How often a request's prompt is computed again."""
        self.clump = 1.0
        """Prompts that come together."""
        self.decode_share = 1.0
        """Share of a residence after the first token, where the batch was looked at last."""
        self._factors = (1.0, 1.0)
        self._points: dict[tuple[int, int, float, float], _Point] = {}
        self._rests: dict[tuple[int, int], tuple[float, float]] = {}
        self._mosts: dict[tuple[int, float, float], float] = {}

    def set(self, lengths: _Lengths, step_factor: float, decode_factor: float) -> None:
        """From now on requests are of those lengths, and steps take so many times as long."""
        # Decoding that slows little by little needs no new table every time.
        decode_factor = math.exp(round(math.log(max(decode_factor, 1e-6)) * 400) / 400)
        if (step_factor, decode_factor) != self._factors or lengths is not self.lengths:
            self._factors = (step_factor, decode_factor)
            self.lengths = lengths
            self._points.clear()
            self._rests.clear()
            self._mosts.clear()

    def at(self, running: float, rate: float) -> _Point:
        """The point nearest to a batch of `running` while prompts come at `rate` a second."""
        size = max(1, round(running))
        bucket = round(math.log(rate) * _RATE_STEPS) if rate > 1e-9 else -(10**6)
        key = (size, bucket, self.again, self.clump)
        point = self._points.get(key)
        if point is None:
            at_rate = math.exp(bucket / _RATE_STEPS) if rate > 1e-9 else 0.0
            point = self._points[key] = self._work_out(size, at_rate * (1 + self.again))
        self.decode_share = 1 - point.first_seconds / point.residence_seconds
        return point

    def rest(self, rate: float, limit: int) -> tuple[float, float]:
        """The batch at which as many leave as come, and by what share a residence grows there with the batch, in logs.

        The limit, and 0.9, where the server cannot keep up below the limit.
        """
        if rate <= 1e-9:
            return 0.0, 0.0
        key = (round(math.log(rate) * _RATE_STEPS), limit)
        found = self._rests.get(key)
        if found is None:
            found = self._rests[key] = self._find_rest(rate, limit)
        return found

    def _find_rest(self, rate: float, limit: int) -> tuple[float, float]:
        def short(size: int) -> float:
            point = self.at(size + 1, rate)
            if rate > 0.98 * point.most_per_second:
                return math.inf
            # The mean of a birth-death process is rate times the residence that one more request would have.
            return rate * point.residence_seconds - size

        low, high = 0, 1
        while short(high) > 0:
            low, high = high, high * 2
            if low >= limit:
                return float(limit), 0.9
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if short(middle) > 0 else (low, middle)
        below, above = short(low), short(high)
        rest = low + below / (below - above) if math.isfinite(below) and below > 0 else float(low)
        there = low + 1 + max(1, low // 4)
        grown = self.at(there, rate).residence_seconds / self.at(low + 1, rate).residence_seconds
        return min(rest, float(limit)), min(0.9, max(0.0, math.log(grown) / math.log(there / (low + 1))))

    def most(self, limit: int) -> float:
        """Requests a second that a full batch lets through."""
        key = (limit, self.again, self.clump)
        found = self._mosts.get(key)
        if found is None:
            found = 0.0
            size = max(1, limit)
            for _ in range(12):
                point = self.at(size, found)
                found = (found + min(size / point.residence_seconds, point.most_per_second)) / (2 if found else 1)
            self._mosts[key] = found
        return found

    def _work_out(self, running: int, rate: float) -> _Point:
        point = self._with(rate, float(running))
        for _ in range(2):
            # Those whose prompts are processed do not decode.
            decoding = running * (1 - point.first_seconds / point.residence_seconds)
            point = self._with(rate, max(0.5, decoding))
        return point

    def _with(self, rate: float, decoding: float) -> _Point:
        spec, lengths = self._spec, self.lengths
        first_alone = spec.policy.prefill_first
        new, output = max(1.0, lengths.uncached_tokens), lengths.output_tokens
        budget = max(1.0, spec.token_budget - (0.0 if first_alone else decoding))
        chunk = min(new, budget)
        chunks = new / chunk
        most = max(1.0, budget / chunk)
        base = self._cost(0.0, 0.0, decoding)
        alone = base if first_alone else 0.0
        costs = {0.0: base}

        def cost(count: float) -> float:
            """Seconds between two tokens while `count` chunks are processed."""
            found = costs.get(count)
            if found is None:
                tokens = count * chunk
                context = tokens * lengths.prefill_context / new
                found = alone + self._cost(tokens, context, 0.0 if first_alone else decoding)
                costs[count] = found
            return found

        # How many chunks meet in one step, and how long steps are, depend on each other.
        mean = base
        for _ in range(40):
            meet = min(rate * chunks * mean, most)
            odds = _odds(meet, most, self.clump)
            before, mean = mean, sum(share * cost(count) for count, share in odds)
            if abs(mean - before) < 1e-4 * mean:
                break
        some = [(count, share) for count, share in odds if count > 0 and share > 0]
        with_prompt = sum(share for _, share in some)
        prompt_time = sum(share * (cost(count) - alone) for count, share in some)
        prompts = meet / chunks
        # Of the time, not of the steps: a request comes at a moment.
        busy = min(0.98, prompt_time / mean)
        step_wait = sum(share * cost(count) ** 2 for count, share in odds) / (2 * mean)
        wait = step_wait
        if chunks > 1:
            first = chunks * (cost(1.0) - alone)
            # Pollaczek and Khinchine; the last chunk of a prompt leaves some of the budget to the next one.
            whole = first * (1 - 0.5 / chunks)
            wait = busy / (1 - busy) * whole * (1 + lengths.prompt_variation**2) / 2 + (1 - busy) * base / 2
        else:
            first = sum(share * (cost(min(count + 1, most)) - alone) for count, share in odds)
            # Where steps are nearly full, a prompt may begin in one and end in the next.
            first += (meet / most) ** 2 * new / budget * (cost(most) - alone)
        if new > spec.policy.prompt_tail_tokens > 0:
            first += mean
        delay = (mean - base) / prompts if some else chunks * (cost(1.0) - base)
        late = sum(share * cost(count) for count, share in some) / with_prompt if some else base
        prompt_steps = 0.0
        if first_alone:
            prompt_steps = with_prompt / prompts if some else chunks
        # Prompts that came while the chunks of this one were processed are waiting when it begins to decode.
        met = prompts * first * delay / base if chunks > 1 else 0.0
        gaps = max(1e-9, output - 1)
        if late > base:
            with_prompt = min(1.0, with_prompt + met / (late - base) / gaps)
        residence = first * (1 + self.again) + gaps * mean + met
        return _Point(
            token_seconds=mean,
            base_seconds=base,
            delay_seconds=delay,
            prompt_seconds=prompt_time / prompts if some else chunks * (cost(1.0) - alone),
            prompt_steps=prompt_steps,
            first_seconds=first,
            residence_seconds=residence,
            elasticity=(1 - first / residence) * (mean - base) / base,
            step_wait_seconds=step_wait,
            wait_seconds=max(wait, step_wait),
            most_per_second=most / chunks / (cost(most) - alone) / (1 + self.again),
            prompts_per_step=prompts,
            late_ratio=with_prompt,
            late_seconds=late,
        )

    def _cost(self, prefill: float, context: float, decoding: float) -> float:
        """Seconds for a step, between those of the whole numbers of sequences around `decoding`."""
        each = self.lengths.decode_context
        step_factor, decode_factor = self._factors
        seconds = self._spec.cost.seconds
        low = int(decoding)
        if not prefill:
            low = max(1, low)
        part = decoding - low
        total = 0.0
        for size, weight in ((low, 1 - part), (low + 1, part)) if part > 0.01 else ((low, 1.0),):
            step = seconds(Work(round(prefill), round(context), size, round(size * each)))
            if decode_factor != 1.0 and size:
                step += min(step, seconds(Work(0, 0, size, round(size * each)))) * (decode_factor - 1)
            total += weight * step
        return total * step_factor


def _odds(mean: float, most: float, clump: float) -> list[tuple[float, float]]:
    """(chunks in a step, probability): Poisson with that mean, and no more than `most`; they come `clump` at a time."""
    if mean <= 0:
        return [(0.0, 1.0)]
    if most < 2:
        return [(0.0, max(0.0, 1 - mean / most)), (most, min(1.0, mean / most))]
    if mean >= most * 0.999:
        return [(most, 1.0)]
    if mean > 8:
        # Three points that have the mean and the variance.
        spread = math.sqrt(3 * mean)
        return [(max(0.0, mean - spread), 1 / 6), (mean, 2 / 3), (min(most, mean + spread), 1 / 6)]
    odds: list[tuple[float, float]] = []
    share = math.exp(-mean / clump)
    left = 1.0
    count = 0
    while count * clump < most - 1e-9 and left > 1e-5:
        odds.append((count * clump, share))
        left -= share
        count += 1
        share *= mean / clump / count
    odds.append((min(most, count * clump), max(0.0, left)))
    return odds


def _idle(rest: float, before: int, x: float, dispersion: float) -> float:
    """Share of a time of `x` residences in which nobody runs, with `before` at its beginning.

    `dispersion` is the variance of the batch over its mean, which makes the odds negative binomial.
    """
    if rest > 12 or (x < 1 and before > 12):
        return 0.0
    over = dispersion - 1
    bunched = math.log(dispersion) / over if over > 0.01 else 1.0
    idle = 0.0
    for part, weight in ((0.0, 1.0), (0.25, 4.0), (0.5, 2.0), (0.75, 4.0), (1.0, 1.0)):
        gone = -math.expm1(-x * part)
        idle += weight * (gone**before if before else 1.0) * math.exp(-rest * bunched * gone)
    return idle / 12


@lru_cache(maxsize=8192)
def _shares(edges: tuple[float, ...], log_mean_40: int, spread_20: int) -> tuple[tuple[int, float], ...]:
    """(bucket, share of observations in it) for a log-normal with that mean and spread, both rounded."""
    spread = max(0.05, spread_20 / 20)
    centre = log_mean_40 / 40 - spread**2 / 2
    below = 0.0
    found: list[tuple[int, float]] = []
    for index, edge in enumerate((*edges, math.inf)):
        if edge <= 0:
            continue
        upto = 1.0 if math.isinf(edge) else 0.5 * math.erfc((centre - math.log(edge)) / (spread * math.sqrt(2)))
        if upto - below > 1e-9:
            found.append((index, upto - below))
            below = upto
    return tuple(found)


_NORMAL = NormalDist()


def _log_normal_at(quantile: float, spread: float) -> float:
    """The quantile of a log-normal variable over its mean."""
    if not spread:
        return 1.0
    return math.exp(spread * _NORMAL.inv_cdf(min(max(quantile, 1e-12), 1 - 1e-12)) - spread**2 / 2)


def _largest_poisson(mean: float, tail: float) -> int:
    """The number that a Poisson variable exceeds with probability below `tail`."""
    share = math.exp(-mean)
    above = 1 - share
    count = 0
    while above > tail and count < 10_000:
        count += 1
        share *= mean / count
        above -= share
        if share < 1e-300:
            break
    return count


def _round(rng: random.Random, value: float) -> int:
    """A whole number next to `value`, and `value` on average."""
    return math.floor(value + rng.random())


def _poisson(rng: random.Random, mean: float) -> int:
    if mean <= 0:
        return 0
    if mean > 12:
        return max(0, round(rng.gauss(mean, math.sqrt(mean))))
    floor = math.exp(-mean)
    count = 0
    product = rng.random()
    while product > floor:
        count += 1
        product *= rng.random()
    return count


def _dispersed(rng: random.Random, mean: float, dispersion: float) -> int:
    """Negative binomial: with `dispersion` times the variance of a Poisson variable."""
    if dispersion <= 1.001 or mean <= 0:
        return _poisson(rng, mean)
    if mean > 12 * dispersion:
        return max(0, round(rng.gauss(mean, math.sqrt(mean * dispersion))))
    return _poisson(rng, rng.gammavariate(mean / (dispersion - 1), dispersion - 1))


def _leaving(rng: random.Random, mean: float, variation: float) -> int:
    """How many leave a batch that is kept full: over a long time their number varies as their lengths do."""
    return _round(rng, mean + (_poisson(rng, mean) - mean) * min(1.0, variation))


def _binomial(rng: random.Random, count: int, odds: float) -> int:
    if count <= 0 or odds <= 0:
        return 0
    if odds >= 1:
        return count
    if count < 16:
        draw = rng.random
        return sum([draw() < odds for _ in range(count)])
    variance = count * odds * (1 - odds)
    if variance > 3:
        return min(count, max(0, round(rng.gauss(count * odds, math.sqrt(variance)))))
    if odds < 0.5:
        return min(count, _poisson(rng, count * odds))
    return count - min(count, _poisson(rng, count * (1 - odds)))


def _gamma(rng: random.Random, mean: float, count: int, variation: float) -> float:
    """The sum of `count` lengths that vary by that much, `mean` on average."""
    if not count or not variation:
        return mean
    deviation = variation / math.sqrt(count)
    if deviation < 0.15:
        return mean * (1 + deviation * rng.gauss(0, 1))
    return rng.gammavariate(1 / deviation**2, mean * deviation**2)
