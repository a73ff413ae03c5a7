"""Time to first token predicted by the cost model, and the rule built on it."""

from tailrace.compiled import inner
from tailrace.policy.rules.quantities import in_flight_tokens, pending_uncached
from tailrace.view.cost_model import token_ms


@inner
def predicted_ttft(view, i):
    """Predicted seconds from now to the request's first token on replica ``i``.

    First come, first served: the queued prompts and then its own are prefilled in chunks of the
    token budget less one token per answering request. When batch slots or KV memory run out, a
    corresponding share of the answering requests must end first, each after ``predicted_output``
    tokens.
    """
    replica, cost, request = view.replicas[i], view.costs[i], view.request
    decodes = min(replica["in_flight"] - replica["queued"], replica["batch_cap"])
    chunk = max(1, replica["token_budget"] - decodes)
    work = max(1, pending_uncached(view, i))
    full = work // chunk
    rest = work - full * chunk
    ms = full * token_ms(cost, float(decodes + chunk))
    if rest > 0:
        ms += token_ms(cost, float(decodes + rest))
    iterations = full + (rest > 0)
    ms += iterations * cost["per_context_ms"] * replica["context_tokens"]
    ms += cost["per_prefill_ms"] * _prefill_work(view, i)
    if decodes > 0:
        slots = (replica["in_flight"] + 1 - replica["batch_cap"]) / decodes
        missing = in_flight_tokens(replica) + request["prompt_tokens"] - replica["capacity_tokens"]
        share = max(0.0, slots, missing / max(1.0, float(replica["context_tokens"])))
        decode_ms = token_ms(cost, float(decodes))
        decode_ms += cost["per_context_ms"] * replica["context_tokens"]
        ms += share * request["predicted_output"] * decode_ms
    return ms / replica["speed"] * 1e-3


@inner
def _prefill_work(view, i):
    """Sum of chunk*(context + chunk/2) over all pending chunks, however they are cut.

    A prompt of P tokens of which c are cached comes to (P*P - c*c)/2. Of the queued prompts only
    the sums are known, so they count as equally long.
    """
    replica = view.replicas[i]
    prompt = float(view.request["prompt_tokens"])
    cached = float(replica["cached_tokens"])
    work = 0.5 * (prompt * prompt - cached * cached)
    if replica["queued"] > 0:
        tokens = float(replica["queued_tokens"])
        cached = tokens - replica["queued_uncached"]
        work += 0.5 * (tokens * tokens - cached * cached) / replica["queued"]
    return work


@inner
def prefill_s(view, i, first, last):
    """Seconds in which replica ``i`` computes the tokens ``first`` to ``last`` of a prompt.

    With attention to all tokens before them, which long prompts spend most of the time on.
    """
    replica = view.replicas[i]
    linear = (last - first) / max(1e-9, replica["prefill_tokens_per_s"])
    attention = view.costs[i]["per_prefill_ms"] * 0.5 * (last * last - first * first)
    return linear + attention / replica["speed"] * 1e-3


@inner
def queued_prefill_s(view, i):
    """Seconds in which replica ``i`` computes the prompts that wait there, as if equally long."""
    replica = view.replicas[i]
    if replica["queued"] <= 0:
        return 0.0
    prompt = float(replica["queued_tokens"]) / replica["queued"]
    cached = prompt - float(replica["queued_uncached"]) / replica["queued"]
    return replica["queued"] * prefill_s(view, i, cached, prompt)


@inner
def least_predicted_ttft(view, _params, scores):
    """Earliest predicted first token."""
    for i in range(scores.size):
        scores[i] = predicted_ttft(view, i)
