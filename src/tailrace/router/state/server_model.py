"""Learns how fast each server is from what streams through the router.

A stretch of time at a server (a request's wait for its first token, or its answer from the first
token to the last) is a sum of iterations, and by the cost model (view/cost_model.py) a sum over
iterations is linear in its coefficients. How many iterations there were and what they worked on is
in the ledger: a stream gets one token per iteration, and prompts are counted when their first token
comes. Of an answer that does not stream only the end is seen, so its whole time is one stretch, and
what else the server did is known less well. So every stretch is one linear equation, and a Kalman
filter keeps the solution: *factors* by which the coefficients differ from those of the device that
is assumed at the start. Both stretches of a request teach when its answer ends: only then do many
servers say how much of the prompt they had cached.

The filter starts from a prior over devices, in which all coefficients scale together more readily
than they differ. It forgets slowly, and quickly when what it sees no longer fits, so that it
follows a server that slows down. Requests that follow each other closely do not all teach
(``lesson_interval_s``). ``cluster.py`` calls the compiled functions.
"""

# mypy: disallow-untyped-defs=False

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tailrace.compiled import inner, jit
from tailrace.config import Replica
from tailrace.view.cost_model import prefill_tokens_per_s, token_ms
from tailrace.view.records import COST, MAX_KNOTS, NEVER
from tailrace.view.replicas import replica_costs

#: Factors: of base_ms, of per_token_ms with the knots' slopes, of per_context_ms, of
#: per_prefill_ms, and of OVERHEAD_S, which is no part of the cost model.
BASE, TOKEN, CONTEXT, PREFILL, OVERHEAD = range(5)
N_FACTORS = 5
#: What a request is assumed to take beside its iterations: network, HTTP, tokenising; s.
OVERHEAD_S = 0.005

#: Prior over devices: standard deviation of a factor common to all coefficients, and of each
#: coefficient's own. Public presets (view/devices.py) differ from the reference by 0.2 to 3.
COMMON_SD, OWN_SD = 1.0, 0.5
#: The overhead depends on the network and on how busy the server's front end is: from a fraction of
#: a ms to some 0.1 s.
OVERHEAD_SD = 8.0
#: How much the factors may change, as variance per second: all together, each by itself, and the
#: overhead.
COMMON_DRIFT, OWN_DRIFT, OVERHEAD_DRIFT = 1e-4, 1e-5, 0.05
#: Expected deviation of an equation, as a share of the time: of answers, of first tokens, in which
#: it is known less well what the server was doing, and of answers that did not stream. Some ms are
#: the network's.
ANSWER_NOISE, FIRST_NOISE, WHOLE_NOISE, NOISE_S = 0.05, 0.25, 0.15, 0.002
#: Weight of one more answer in the scatter of a server's times, and the largest deviation that
#: counts, as a share.
SCATTER_STEP, MOST_OFF = 0.05, 2.0
#: A deviation, in those expected, beyond which the server is taken to have changed; and a moving
#: mean of deviations beyond which it has, because they keep to one side. Of a server that is well
#: known the mean is 0, with a standard deviation of 0.33.
SURPRISE, BIASED = 3.0, 1.0
#: Weight of one more equation in that mean.
BIAS_STEP = 0.2
#: Factor of all variances for each equation that shows such a change.
DOUBT = 1.3
#: Smallest factor, and largest variance of one.
LEAST, MAX_VARIANCE = 0.01, 100.0
#: Weight of one more equation in the moving mean of relative errors.
ERROR_STEP = 0.02
#: Shortest time between two requests to a server that teach, s: while it is little known or seems
#: to have changed, and afterwards. A lesson costs 16 us of CPU time.
LESSON_EVERY_S, REVIEW_EVERY_S = 0.02, 3.0
#: Equations after which a server is known, and mean deviation up to which it still is.
MANY, SETTLED = 1000, 0.8

#: What is known of a server.
SERVER_MODEL = np.dtype(
    [
        ("learns", "i8"),  # 1: from what streams; 0: its settings say how fast it is
        ("prior", COST),  # of the device that is assumed
        ("factors", "f8", (N_FACTORS,)),
        ("covariance", "f8", (N_FACTORS, N_FACTORS)),
        ("updated_at", "f8"),  # s
        ("equations", "i8"),  # so far
        ("error", "f8"),  # moving mean of |predicted - seen| / seen
        ("bias", "f8"),  # moving mean of seen - predicted, in expected deviations
        # of answers: deviation of the last one as a share, and how much that varies from one to the
        # next (standard deviation; not from the prediction, which is off when a server slows down)
        ("last_off", "f8"),
        ("scatter", "f8"),
        # totals of prompts whose first token has come
        ("prefilled", "f8"),  # uncached tokens
        ("prefill_work", "f8"),  # W of view/cost_model.py
        # scratch
        ("row", "f8", (N_FACTORS,)),
        ("gain", "f8", (N_FACTORS,)),
    ]
)
#: What a server had done by some moment: the time, s; tokens streamed by all; uncached prompt
#: tokens and W of prompts whose first token had come; tokens of context of those answering, and how
#: many they are; uncached prompt tokens that were probably prefilled already; requests that it had;
#: and whether requests waited in its queue, or may have (1).
AT, OUTPUT, PREFILLED, PREFILL_WORK, CONTEXTS, DECODES, BEGUN, REQUESTS, QUEUES = range(9)
#: Rows of a lesson: when a request was sent, and when its first token came (zeros before that). An
#: array of plain floats: NumPy takes ten times as long to make one with named fields.
SENT, FIRST = range(2)
LESSON_SHAPE = (2, QUEUES + 1)
#: Settings of a server that say how fast it is.
SPEED_SETTINGS = frozenset({"device", "cost", "speed"})


def new_models(servers: Sequence[Replica]) -> NDArray[np.void]:
    """Return the models [n] of servers of which nothing has been seen.

    One whose settings say how fast it is keeps the cost model that follows from them.
    """
    models = np.zeros(len(servers), SERVER_MODEL)
    models["learns"] = [SPEED_SETTINGS.isdisjoint(s.model_fields_set) for s in servers]
    models["prior"] = replica_costs(servers)
    models["factors"] = 1.0
    models["covariance"] = COMMON_SD**2 + OWN_SD**2 * np.eye(N_FACTORS)
    models["covariance"][:, OVERHEAD, :] = models["covariance"][:, :, OVERHEAD] = 0.0
    models["covariance"][:, OVERHEAD, OVERHEAD] = OVERHEAD_SD**2
    return models


def lesson_interval_s(model: np.void) -> float:
    """Return the shortest time between two lessons of a server, s."""
    is_known = model["equations"] >= MANY and abs(model["bias"]) < SETTLED
    return REVIEW_EVERY_S if is_known else LESSON_EVERY_S


@inner
def _note(done, models, replicas, r, now):
    done[AT] = now
    done[OUTPUT] = done[PREFILLED] = done[PREFILL_WORK] = 0.0
    done[CONTEXTS] = done[DECODES] = 0.0
    for w in range(models.shape[0]):
        replica = replicas[w, r]
        streamed = replica["context_tokens"] - replica["answering_prompts"]
        done[OUTPUT] += replica["finished_tokens"] + streamed
        done[PREFILLED] += models[w, r]["prefilled"]
        done[PREFILL_WORK] += models[w, r]["prefill_work"]
        done[CONTEXTS] += replica["context_tokens"]
        done[DECODES] += replica["in_flight"] - replica["queued"]


@jit
def sent(models, replicas, r, lesson, now):
    """A request leaves for replica ``r``; the ledger does not have it yet.

    ``models`` [w, n] and ``replicas`` [w or more, n] REPLICA_VIEW of all workers;
    ``lesson`` [LESSON_SHAPE].
    """
    done = lesson[SENT]
    _note(done, models, replicas, r, now)
    # Of the prompt that is being prefilled, about half is done.
    uncached, queued = 0.0, 0.0
    for w in range(models.shape[0]):
        uncached += replicas[w, r]["queued_uncached"]
        queued += replicas[w, r]["queued"]
    done[BEGUN] = 0.5 * uncached / max(queued, 1.0)
    done[REQUESTS] = queued + done[DECODES]


@inner
def _queues(replicas, r):
    """Whether requests wait in the server's queue by its latest metrics, or may, without any.

    If none does, a long wait for a first token is the overhead of the request: it was on its way,
    or the server's front end was busy.
    """
    latest, waiting = NEVER, 1
    for w in range(replicas.shape[0]):
        if replicas[w, r]["metrics_at"] > latest:
            latest, waiting = replicas[w, r]["metrics_at"], replicas[w, r]["waiting"]
    return waiting > 0


@inner
def _work(prompt):
    """W of view/cost_model.py of a prompt with so many uncached and cached tokens."""
    return prompt[0] * (prompt[1] + 0.5 * prompt[0])


@inner
def prefilled(model, prompt, cached):
    """A server has read a prompt of so many tokens, of which it had some cached."""
    uncached = float(prompt - cached)
    model["prefilled"] += uncached
    model["prefill_work"] += _work((uncached, float(cached)))


@jit
def first_token(models, replicas, r, lesson, now, prompt, cached):
    """A request's first token has come; the ledger has it still queued, its prompt not read."""
    done = lesson[FIRST]
    _note(done, models, replicas, r, now)
    uncached = float(prompt - cached)
    done[PREFILLED] += uncached
    done[PREFILL_WORK] += _work((uncached, float(cached)))
    done[QUEUES] = 1.0 if _queues(replicas, r) else 0.0


@jit
def ended(models, replicas, costs, me, r, lesson, now, output, believed, counted):
    """Learn from an answer that is complete after ``output`` tokens; the ledger still has it.

    ``believed``: uncached and cached tokens of its prompt as counted among the prefilled;
    ``counted``: the same by the server's own count, if it gives one.
    """
    model, replica = models[me, r], replicas[me, r]
    if output < 2:
        return
    if lesson[FIRST, AT] == 0.0:
        _whole(models, replicas, me, r, lesson, now, output)
        apply(model, replica, costs[r])
        return
    _first(model, replica, lesson, believed, counted)
    before, after = lesson[FIRST], lesson[SENT]
    _note(after, models, replicas, r, now)
    iterations = output - 1.0
    tokens = max(iterations, after[OUTPUT] - before[OUTPUT])
    prefilled = max(0.0, after[PREFILLED] - before[PREFILLED])
    work = max(0.0, after[PREFILL_WORK] - before[PREFILL_WORK])
    context = 0.5 * (before[CONTEXTS] + after[CONTEXTS])
    _equation(model, replica, iterations, tokens, prefilled, context, work)
    seconds = (now - before[AT]) * replica["speed"]
    _learn(model, seconds, now, max(ANSWER_NOISE, _scatter(model, seconds)))
    apply(model, replica, costs[r])


@inner
def _scatter(model, seconds):
    """How much the server's answers scatter, as a share of their time; notes one more of them."""
    expected = 1e-9
    for i in range(N_FACTORS):
        expected += model["row"][i] * model["factors"][i]
    off = min(seconds / expected - 1.0, MOST_OFF)
    # Of two numbers with a standard deviation of 1, the difference is 1.13 on average.
    jump = abs(off - model["last_off"]) / 1.13 if model["equations"] > 2 else 0.0
    model["last_off"] = off
    model["scatter"] += SCATTER_STEP * (jump - model["scatter"])
    return model["scatter"]


@inner
def _first(model, replica, lesson, believed, counted):
    """Learn from the wait for a first token."""
    before, after = lesson[SENT], lesson[FIRST]
    others = after[PREFILLED] - before[PREFILLED] - believed[0] - before[BEGUN]
    prefilled = counted[0] + max(0.0, others)
    output = max(0.0, after[OUTPUT] - before[OUTPUT])
    decodes = 0.5 * (before[DECODES] + after[DECODES])
    iterations = max(1.0, np.ceil(prefilled / max(1.0, replica["token_budget"] - decodes)))
    if decodes >= 1.0 and after[QUEUES] > 0.0:
        # A wait for room in the batch or in memory is full of answers' iterations.
        iterations = max(iterations, output / decodes)
    work_of_all = after[PREFILL_WORK] - before[PREFILL_WORK]
    work = _work(counted) + max(0.0, work_of_all - _work(believed))
    context = 0.5 * (before[CONTEXTS] + after[CONTEXTS])
    _equation(model, replica, iterations, output, prefilled, context, work)
    if before[REQUESTS] > 0.0:  # it arrived in the middle of an iteration
        model["row"][BASE] *= 1.0 + 0.5 / iterations
    model["row"][OVERHEAD] = OVERHEAD_S
    _learn(model, (after[AT] - before[AT]) * replica["speed"], after[AT], FIRST_NOISE)


@inner
def _whole(models, replicas, me, r, lesson, now, output):
    """Learn from an answer that did not stream; its prompt is among the prefilled.

    How many answers were under way is taken from the ledger, which counts those that do not stream
    from their predicted first token on.
    """
    model, replica = models[me, r], replicas[me, r]
    before, after = lesson[SENT], lesson[FIRST]
    _note(after, models, replicas, r, now)
    decodes = max(1.0, 0.5 * (before[DECODES] + 1.0 + after[DECODES]))
    prefilled = max(0.0, after[PREFILLED] - before[PREFILLED])
    work = max(0.0, after[PREFILL_WORK] - before[PREFILL_WORK])
    own = max(1.0, np.ceil(prefilled / max(1.0, replica["token_budget"] - decodes)))
    iterations = output - 1.0 + min(own, float(output))
    context = 0.5 * (before[CONTEXTS] + after[CONTEXTS]) + 0.5 * output
    _equation(model, replica, iterations, iterations * decodes, prefilled, context, work)
    model["row"][BASE] *= 1.0 + 0.5 / iterations
    model["row"][OVERHEAD] = OVERHEAD_S
    _learn(model, (now - before[AT]) * replica["speed"], now, WHOLE_NOISE)


@inner
def _equation(model, replica, iterations, output, prefilled, context, work):
    """Fill the row: seconds of each part of a stretch if all factors were 1."""
    row, prior = model["row"], model["prior"]
    batch = output / iterations
    chunk = max(1.0, replica["token_budget"] - batch)
    mixed = min(iterations, np.ceil(prefilled / chunk))  # iterations with a piece of a prompt
    base = prior["base_ms"]
    tokens = (iterations - mixed) * (token_ms(prior, batch) - base)
    if mixed > 0.0:
        tokens += mixed * (token_ms(prior, batch + prefilled / mixed) - base)
    row[BASE] = iterations * base * 1e-3
    row[TOKEN] = tokens * 1e-3
    row[CONTEXT] = iterations * context * prior["per_context_ms"] * 1e-3
    row[PREFILL] = work * prior["per_prefill_ms"] * 1e-3
    row[OVERHEAD] = 0.0


@inner
def _learn(model, seconds, now, noise):
    """One step of the filter: the row times the factors is ``seconds``, more or less."""
    if seconds <= 0.0:
        return  # too quick for the clock
    row, gain, factors, covariance = (
        model["row"], model["gain"], model["factors"], model["covariance"],
    )  # fmt: skip
    elapsed = max(0.0, now - model["updated_at"]) if model["equations"] > 0 else 0.0
    model["updated_at"] = now
    model["equations"] += 1
    expected = 0.0
    for i in range(N_FACTORS):
        expected += row[i] * factors[i]
        covariance[i, i] += (OVERHEAD_DRIFT if i == OVERHEAD else OWN_DRIFT) * elapsed
        for j in range(OVERHEAD):
            if i < OVERHEAD:
                covariance[i, j] += COMMON_DRIFT * elapsed
    variance = 0.0
    for i in range(N_FACTORS):
        total = 0.0
        for j in range(N_FACTORS):
            total += covariance[i, j] * row[j]
        gain[i] = total
        variance += row[i] * total
    sd = noise * expected + NOISE_S  # not of what was seen, or long times would count less
    variance += sd * sd
    off = seconds - expected
    error = min(abs(off) / max(seconds, 1e-6), 10.0)
    model["error"] += max(ERROR_STEP, 1.0 / model["equations"]) * (error - model["error"])
    limit = SURPRISE * np.sqrt(variance)
    surprised = abs(off) > limit
    off = min(max(off, -limit), limit)
    model["bias"] += BIAS_STEP * (SURPRISE * off / limit - model["bias"])
    surprised |= abs(model["bias"]) > BIASED
    for i in range(N_FACTORS):
        factors[i] = max(LEAST, factors[i] + gain[i] / variance * off)
    for i in range(N_FACTORS):
        for j in range(N_FACTORS):
            if surprised:
                if covariance[i, i] < MAX_VARIANCE and covariance[j, j] < MAX_VARIANCE:
                    covariance[i, j] *= DOUBT
            else:
                covariance[i, j] -= gain[i] * gain[j] / variance


@jit
def apply(model, replica, cost):
    """Write the cost model that follows from the factors, and what follows from that."""
    factors, prior = model["factors"], model["prior"]
    cost["base_ms"] = prior["base_ms"] * factors[BASE]
    cost["per_token_ms"] = prior["per_token_ms"] * factors[TOKEN]
    cost["per_context_ms"] = prior["per_context_ms"] * factors[CONTEXT]
    cost["per_prefill_ms"] = prior["per_prefill_ms"] * factors[PREFILL]
    for k in range(MAX_KNOTS):
        cost["slope_ms"][k] = prior["slope_ms"][k] * factors[TOKEN]
    replica["prefill_tokens_per_s"] = prefill_tokens_per_s(
        cost, replica["token_budget"], replica["speed"]
    )


@jit
def answer_ms(cost, answers, context):
    """Time of one iteration that decodes ``answers`` requests of ``context`` tokens each, ms."""
    return token_ms(cost, float(answers)) + cost["per_context_ms"] * (answers * context)
