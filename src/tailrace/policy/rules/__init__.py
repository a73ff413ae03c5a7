"""The built-in rules: the table of all of them, and the compiled function that calls them.

A rule is a compiled function ``rule(view, params, scores)`` that fills ``scores`` [n], lower is
better. To add one: write it in the file of its family, import it here, append an entry to _TABLE
and a branch ``code == CODE.name`` to ``score``. Numbers follow from the table, and
tests/policy/test_dispatcher.py checks that table and branches agree.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from tailrace.compiled import inner, positions
from tailrace.policy.rules.counting import (
    least_outstanding,
    least_pending_prefill,
    least_pending_uncached,
    power_of_two,
    random,
    round_robin,
    vidur_lor,
    vllm_dp,
)
from tailrace.policy.rules.hashing import dual_map, prefix_hash, rendezvous_hash
from tailrace.policy.rules.predicted import least_predicted_ttft
from tailrace.policy.rules.prefix_aware import (
    aibrix_prefix,
    cache_aware,
    llm_d_sticky,
    preble,
    sglang_cache_aware,
)
from tailrace.policy.rules.scored import dynamo, least_load, llm_d, llumnix, lmetric, load_aware
from tailrace.policy.rules.smg import (
    smg_cache_aware,
    smg_expected_wait,
    smg_power_of_two,
    smg_prefix_hash,
)
from tailrace.policy.rules.sticky import sticky_session, tolerant_sticky


@dataclass(frozen=True)
class Rule:
    """One built-in rule, as `tailrace policies` shows it."""

    name: str
    source: str
    """Where it comes from."""
    rule_text: str
    """What it does, and how that differs from its source."""
    params: Mapping[str, float] = field(default_factory=dict)
    """Names and defaults of its parameters, in the order of the parameter vector."""
    version: str = ""
    """Version and date of the source that was read; empty: none in particular."""
    lowest_id_wins: bool = False
    """Ties go to the lowest replica number instead of a random one."""
    uses_metrics: bool = False
    """Whether it reads the metrics snapshot."""
    uses_prefix: bool = False
    """Whether it reads the prefix index."""
    uses_context: bool = False
    """Whether it reads the context of the answering requests."""
    uses_active: bool = False
    """Whether it reads active_blocks and new_blocks, which are counted for such rules only."""
    index_learns: str = ""
    """When the prefix index of its source learns of a prompt; empty: it has none, or when sent."""
    in_engine: bool = False
    """Whether it runs inside the simulator only and has no branch in ``score``."""
    code: int = -1
    """Its number in compiled code: its place in the table."""

    def vector(self, changes: Mapping[str, float] | None = None) -> NDArray[np.float64]:
        """Return the parameters as a vector [p], with ``changes`` applied."""
        values = {**self.params, **(changes or {})}
        return np.array([values[name] for name in self.params], np.float64)


_SMG = "SMG 1.13.0, read and tried in November 2026"
_VETO = (
    "Replicas with veto_waiting requests waiting or veto_kv of their KV memory in use get nothing; "
    "if all are so, fewest in flight"
)
_VETO_PARAMS = {"veto_waiting": 8.0, "veto_kv": 0.8}

_TABLE = (
    Rule("random", "every router", "uniformly at random"),
    Rule("round_robin", "every router", "in turn, skipping unavailable replicas"),
    Rule(
        "vidur_lor",
        "Vidur",
        "fewest waiting requests (snapshot plus sent since), ties to the lowest number",
        version="Vidur 0.0.26, tried in November 2026",
        lowest_id_wins=True,
        uses_metrics=True,
    ),
    Rule("least_outstanding", "every router", "fewest requests in flight"),
    Rule(
        "power_of_two",
        "SGLang, Ray Serve, Envoy",
        "of two distinct random replicas the one with fewer requests in flight",
    ),
    Rule(
        "vllm_dp",
        "vLLM's internal balancer",
        "min waiting_weight * waiting + running, waiting counted on between two snapshots",
        {"waiting_weight": 4.0},
        uses_metrics=True,
    ),
    Rule(
        "least_pending_prefill",
        "Vidur canary, lop",
        "fewest prompt tokens sent and without a first token yet",
    ),
    Rule(
        "least_pending_uncached",
        "Llumnix",
        "min pending uncached prompt tokens + own uncached tokens",
        uses_prefix=True,
    ),
    Rule(
        "sticky_session",
        "vLLM production-stack, Vidur canary",
        "the replica of the session's last request; without one, fewest in flight",
    ),
    Rule(
        "tolerant_sticky",
        "after Vidur canary",
        "the session's replica while its pending + own uncached tokens <= tolerance * the least, "
        "else the least; Vidur compares spreads of that load instead",
        {"tolerance": 2.0},
        uses_prefix=True,
    ),
    Rule(
        "cache_aware",
        "SGLang gateway, early form",
        "fewest in flight if max - min > load_gap and max > load_ratio * min; else longest prefix "
        "match if it exceeds match_rate of the prompt; else the smallest prefix tree; today's "
        "forms are sglang_cache_aware and smg_cache_aware",
        {"load_gap": 64.0, "load_ratio": 1.5, "match_rate": 0.3},
        uses_prefix=True,
    ),
    Rule(
        "sglang_cache_aware",
        "SGLang gateway, vllm-router",
        "fewest in flight if max - min > load_gap and max > load_ratio * min; else longest prefix "
        "match if it exceeds match_rate of the prompt; else fewest in flight; ties to the lowest "
        "number",
        {"load_gap": 64.0, "load_ratio": 1.5, "match_rate": 0.3},
        version="vllm-router 0.1.16 and sglang-router 0.3.2, tried in November 2026",
        lowest_id_wins=True,
        uses_prefix=True,
    ),
    Rule(
        "smg_cache_aware",
        "Shepherd model gateway",
        "least expected wait (see smg_expected_wait) among the holders of the longest match, if it "
        "exceeds match_rate of the prompt, that are not hot; all hot: among all that are not; no "
        "match: among all. Hot: in flight above load_ratio * mean and above mean + min(load_gap, "
        "max(4, 2 sqrt mean)). " + _VETO,
        {"load_gap": 64.0, "load_ratio": 1.5, "match_rate": 0.3, **_VETO_PARAMS},
        version=_SMG,
        uses_metrics=True,
        uses_prefix=True,
    ),
    Rule(
        "prefix_hash",
        "SGLang gateway, consistent hashing with bounded loads",
        "the replica drawn by rendezvous hash of the first 256 tokens while its load <= "
        "load_factor * the mean, this request included; else fewest in flight",
        {"load_factor": 1.25},
    ),
    Rule(
        "smg_prefix_hash",
        "Shepherd model gateway",
        "the replica drawn by rendezvous hash of the first 256 tokens (there a ring of 150 virtual "
        "nodes) while its load <= max(load_factor * a, a + 10), a the mean with this request; else "
        "fewest in flight. " + _VETO,
        {"load_factor": 1.25, **_VETO_PARAMS},
        version=_SMG,
        uses_metrics=True,
    ),
    Rule(
        "rendezvous_hash",
        "vllm-router",
        "the largest draw by hash of session and replica; without a session, of the whole prompt "
        "and replica; load does not matter",
        version="vllm-router 0.1.16, read in November 2026",
    ),
    Rule(
        "lmetric",
        "LMetric",
        "min (pending + own uncached tokens) * (requests in flight + 1)",
        version="the paper, arXiv 2603.15202 of 16 March 2026; ports of it differ",
        uses_prefix=True,
    ),
    Rule(
        "dynamo",
        "NVIDIA Dynamo, KV router",
        "min overlap_weight * (uncached tokens without a first token, this prompt's included) / "
        "block size + distinct full prompt blocks of the requests in flight and this one; output "
        "blocks do not count; temperature 0, no queue",
        {"overlap_weight": 1.0},
        version="Dynamo 1.6.1, tried in November 2026",
        uses_prefix=True,
        uses_active=True,
        index_learns="from KV events (router.prefix_learns = events)",
    ),
    Rule(
        "llm_d",
        "llm-d, built-in profile",
        "max queue_weight * (longest - queue)/(longest - shortest) + kv_weight * (1 - KV use) + "
        "prefix_weight * share of the prompt's blocks of 64 tokens that match, of the first "
        "131 072 tokens",
        {"queue_weight": 2.0, "kv_weight": 2.0, "prefix_weight": 3.0},
        version="llm-d-router, August 2026",
        index_learns="when sent; its precise prefix scorer from KV events (router.prefix_learns = "
        "events)",
        uses_metrics=True,
        uses_prefix=True,
        uses_context=True,
    ),
    Rule(
        "llm_d_sticky",
        "llm-d guides, prefix-cache-affinity filter",
        "fewest pending + own uncached tokens among the replicas with match_rate of the prompt's "
        "blocks of 64 tokens, unless pending tokens / tokens_per_s of the best of them exceeds "
        "that of the best other by max_penalty_s; then among all; without random exploration",
        {"match_rate": 0.8, "max_penalty_s": 18.0, "tokens_per_s": 15_928.0},
        version="llm-d-router, August 2026",
        uses_prefix=True,
    ),
    Rule(
        "load_aware",
        "vLLM production-stack",
        "max matched share - load_weight * (in flight - mean)/max(1, mean); there ties go to the "
        "lowest URL, and prompts that no replica holds by session or request rate",
        {"load_weight": 1.0},
        version="production-stack, pull request 1035, read in November 2026",
        uses_prefix=True,
    ),
    Rule(
        "least_load",
        "after the Shepherd model gateway",
        "min pending uncached tokens / prefill throughput + kv_weight * k/(1 - k), k = KV use; "
        "the pending tokens are the router's own count, which no poll makes stale; the gateway's "
        "own rule is smg_expected_wait",
        {"kv_weight": 0.15},
        uses_metrics=True,
        uses_context=True,
    ),
    Rule(
        "smg_expected_wait",
        "Shepherd model gateway, least_load",
        "min 1024 tokens / 2000 per s for each request reported waiting or running, sent since "
        "the report, or in flight and neither + 0.15 * k/(1 - k), k = KV use; these constants hold "
        "for servers that report no rate, such as vLLM, and over HTTP. " + _VETO,
        _VETO_PARAMS,
        version=_SMG,
        uses_metrics=True,
    ),
    Rule(
        "smg_power_of_two",
        "Shepherd model gateway",
        "of two distinct random replicas the one with the least expected wait. " + _VETO,
        _VETO_PARAMS,
        version=_SMG,
        uses_metrics=True,
    ),
    Rule(
        "aibrix_prefix",
        "AIBrix, prefix-cache",
        "longest match, in whole per cent, among the least loaded if max - min > load_gap, else "
        "among those with at most mean + deviations * standard deviation in flight; equal matches "
        "and no match: fewest in flight",
        {"load_gap": 8.0, "deviations": 1.0},
        version="AIBrix, August 2026",
        uses_prefix=True,
    ),
    Rule(
        "preble",
        "Preble",
        "the replica with the prefix if more than exploit_share of the prompt is cached; else min "
        "recent work + eviction_weight * evicted + missed tokens, in seconds of prefill; work "
        "fades over 180 s instead of a 3-minute window and leaves out decoding",
        {"exploit_share": 0.5, "eviction_weight": 1.0},
        uses_prefix=True,
    ),
    Rule(
        "llumnix",
        "Llumnix",
        "max (free blocks - blocks of the queued prompts) / requests in flight, idle ones first; "
        "dispatching only, no migration",
        uses_metrics=True,
        uses_context=True,
    ),
    Rule(
        "dual_map",
        "DualMap",
        "two candidates by hash of the first 256 tokens: the more cached one while its predicted "
        "first token comes within slo_share * the target, else the one predicted faster; no "
        "migration",
        {"slo_share": 1.0},
        uses_prefix=True,
        uses_context=True,
    ),
    Rule(
        "least_predicted_ttft",
        "own, after Block",
        "earliest first token by the calibrated cost model",
        uses_prefix=True,
        uses_context=True,
    ),
    Rule(
        "lookahead",
        "own",
        "least marginal cost by looking ahead with predicted output lengths",
        uses_prefix=True,
        in_engine=True,
    ),
    Rule(
        "lookahead_oracle",
        "own, reference only",
        "the same with the true output lengths",
        uses_prefix=True,
        in_engine=True,
    ),
)

RULES = tuple(replace(rule, code=code) for code, rule in enumerate(_TABLE))
#: Their codes by name, for compiled code: ``CODE.random``.
CODE = positions(rule.name for rule in RULES)

#: A trained network (policy/learned/policy.py): not in the table, since its parameters come from a
#: file.
LEARNED = Rule(
    "learned",
    "own",
    "the replica of highest logit",
    uses_metrics=True,
    uses_prefix=True,
    uses_context=True,
    code=len(RULES),
)


@inner
def score(code, view, params, scores):
    """Fill ``scores`` [n] by the rule of a code; ``params`` [p] in the order of its entry."""
    if code == CODE.random:
        random(view, params, scores)
    elif code == CODE.round_robin:
        round_robin(view, params, scores)
    elif code == CODE.vidur_lor:
        vidur_lor(view, params, scores)
    elif code == CODE.least_outstanding:
        least_outstanding(view, params, scores)
    elif code == CODE.power_of_two:
        power_of_two(view, params, scores)
    elif code == CODE.vllm_dp:
        vllm_dp(view, params, scores)
    elif code == CODE.least_pending_prefill:
        least_pending_prefill(view, params, scores)
    elif code == CODE.least_pending_uncached:
        least_pending_uncached(view, params, scores)
    elif code == CODE.sticky_session:
        sticky_session(view, params, scores)
    elif code == CODE.tolerant_sticky:
        tolerant_sticky(view, params, scores)
    elif code == CODE.cache_aware:
        cache_aware(view, params, scores)
    elif code == CODE.sglang_cache_aware:
        sglang_cache_aware(view, params, scores)
    elif code == CODE.smg_cache_aware:
        smg_cache_aware(view, params, scores)
    elif code == CODE.prefix_hash:
        prefix_hash(view, params, scores)
    elif code == CODE.smg_prefix_hash:
        smg_prefix_hash(view, params, scores)
    elif code == CODE.rendezvous_hash:
        rendezvous_hash(view, params, scores)
    elif code == CODE.lmetric:
        lmetric(view, params, scores)
    elif code == CODE.dynamo:
        dynamo(view, params, scores)
    elif code == CODE.llm_d:
        llm_d(view, params, scores)
    elif code == CODE.llm_d_sticky:
        llm_d_sticky(view, params, scores)
    elif code == CODE.load_aware:
        load_aware(view, params, scores)
    elif code == CODE.least_load:
        least_load(view, params, scores)
    elif code == CODE.smg_expected_wait:
        smg_expected_wait(view, params, scores)
    elif code == CODE.smg_power_of_two:
        smg_power_of_two(view, params, scores)
    elif code == CODE.aibrix_prefix:
        aibrix_prefix(view, params, scores)
    elif code == CODE.preble:
        preble(view, params, scores)
    elif code == CODE.llumnix:
        llumnix(view, params, scores)
    elif code == CODE.dual_map:
        dual_map(view, params, scores)
    elif code == CODE.least_predicted_ttft:
        least_predicted_ttft(view, params, scores)
    else:
        raise ValueError("no rule of this code runs in score()")
