"""The built-in workloads. To add one, add a WorkloadSpec to ``BUILT_IN``; see docs/workloads.md."""

import math

from tailrace.workload import fitted
from tailrace.workload.arrivals import ArrivalProcess, GammaRenewal, Poisson
from tailrace.workload.classes import RequestClass
from tailrace.workload.compose import Part, WorkloadSpec, mix
from tailrace.workload.content import (
    ContentModel,
    Documents,
    Family,
    OneShot,
    PromptFamilies,
    PromptPool,
    SharedPrompts,
)
from tailrace.workload.lengths import Clip, Lognormals
from tailrace.workload.sessions import (
    BetaGeometricTurns,
    Borrow,
    Conversations,
    Think,
    UniformTurns,
)


def lognormal(median: float, sigma: float, low: int, high: int) -> Lognormals:
    """One lognormal by its median in tokens, clipped to [low, high]."""
    return Lognormals(((1.0, math.log(median), sigma),), Clip(low, high))


def _spec(
    name: str,
    rate_rps: float,
    arrivals: ArrivalProcess,
    content: ContentModel,
    description: str,
    source: str,
) -> WorkloadSpec:
    return WorkloadSpec(name, description, source, rate_rps, (Part(name, arrivals, content),))


_TALK = Conversations(
    pool=PromptPool(1, lognormal(880, 0.0, 880, 880)),
    first=fitted.TALK_FIRST,
    user=fitted.TALK_USER,
    output=fitted.TALK_OUTPUT,
    prompt_cap=fitted.TALK_PROMPT_CAP,
    turns=BetaGeometricTurns(3.22, 1.51, edges=(4000, 12_000), factors=(1.12, 1.0, 0.87)),
    mean_turns=1.657,
    think=Think(mu=4.885, sigma=0.984, from_arrival=True, least_s=5.0),
    warmup_s=1800.0,
    borrow=Borrow(chance=0.085, beta_a=0.9, beta_b=1.8, window_s=300.0, least_tokens=1100),
)

_DOCUMENTS = Documents(
    short_weight=0.269,
    short=fitted.DOCUMENT_SHORT,
    single_weight=0.1826,
    single=fitted.DOCUMENT_SINGLE,
    document_weight=0.5485,
    document=fitted.DOCUMENT,
    extra_questions_mean=3.368,
    extra_questions_shape=1.314,
    question=lognormal(math.exp(4.5), 0.8, 1, 4000),
    gap_shape=0.72,
    gap_scale_s=85.0,
    warmup_s=1800.0,
)

_TOOLS = PromptFamilies(
    (
        Family(0.702, 6144, fitted.TOOL_A_TAIL, fitted.TOOL_A_OUTPUT),
        Family(0.298, 2560, fitted.TOOL_B_TAIL, fitted.TOOL_B_OUTPUT),
    )
)

_RAG = SharedPrompts(
    pool=PromptPool(64, lognormal(2000, 0.4, 1000, 4000), zipf=1.0),
    tail=lognormal(120, 0.8, 8, 1000),
    output=fitted.CHAT,
)

#: A cycle of think and service lasts about 3 s, so some 3 x rate agents are at work at a time.
_AGENTS = Conversations(
    pool=PromptPool(8, lognormal(4000, 0.4, 2000, 8000), zipf=1.0),
    first=lognormal(300, 0.8, 20, 4000),
    user=Lognormals(((0.7, 5.0, 0.8), (0.3, 6.7, 0.7)), Clip(8, 8000)),
    output=lognormal(60, 0.7, 4, 1000),
    prompt_cap=32_000,
    turns=UniformTurns(5, 20),
    mean_turns=12.5,
    think=Think(mu=0.0, sigma=0.42),
    warmup_s=120.0,
)

#: A cycle of think (mean 13.8 s) and service (about 4.5 s) lasts about 18 s, so some 18 x rate
#: sessions are live at a time: 32 per replica at 1.75 requests/s per replica.
_HOT = Conversations(
    pool=PromptPool(16, lognormal(500, 0.4, 200, 1200), zipf=1.0),
    first=lognormal(450, 0.7, 30, 2500),
    user=lognormal(90, 1.0, 5, 1500),
    output=lognormal(150, 0.6, 8, 800),
    prompt_cap=8192,
    turns=UniformTurns(6, 14),
    mean_turns=10.0,
    think=Think(mu=math.log(10.0), sigma=0.8),
    warmup_s=300.0,
)

#: Coding agents as in public recordings of them: a tool prompt of 15 000 tokens, contexts of 20 000
#: to 500 000 tokens that grow by a few hundred per turn, dozens of turns, pauses of 10 s (median)
#: with a heavy tail. Half of the sessions last over 20 minutes, one in ten over two hours.
_CODING = Conversations(
    pool=PromptPool(1, lognormal(15_000, 0.0, 15_000, 15_000)),
    first=Lognormals(((0.65, 8.5, 0.6), (0.35, 11.4, 0.9)), Clip(500, 450_000)),
    user=Lognormals(((0.9, 5.9, 1.1), (0.1, 8.0, 1.2)), Clip(20, 60_000)),
    output=Lognormals(((0.8, 5.3, 0.6), (0.2, 6.6, 0.8)), Clip(8, 8000)),
    prompt_cap=500_000,
    turns=BetaGeometricTurns(2.2, 70.0),
    mean_turns=49.6,
    think=Think(mu=math.log(10.0), sigma=1.8),
    warmup_s=20_000.0,
)

_AZURE = "Azure LLM inference 2023 (CC-BY 4.0)"
_MOONCAKE = "Mooncake FAST'25 traces (Apache-2.0)"

_SIMPLE = (
    _spec(
        "chat",
        5.53,
        fitted.CHAT_ARRIVALS,
        OneShot(fitted.CHAT),
        "Prompts of 1 000 tokens and answers of 130 (medians); the rate wanders over minutes.",
        f"{_AZURE}, conversation",
    ),
    _spec(
        "chat-bursty",
        5.53,
        fitted.BURSTY_ARRIVALS,
        OneShot(fitted.CHAT),
        "The lengths of chat, with bursts of twice the mean rate for a minute.",
        "lengths as chat; burstiness after ServeGen m-large (Apache-2.0); a design choice",
    ),
    _spec(
        "chat-oneshot",
        5.0,
        Poisson(),
        OneShot(fitted.ONESHOT),
        "Short first questions, answers of 290 tokens (median).",
        "ShareGPT lengths; arrivals assumed Poisson",
    ),
    _spec(
        "code-completion",
        2.567,
        fitted.CODE_ARRIVALS,
        OneShot(fitted.CODE),
        "Long prompts, very short answers, in batches between long silences.",
        f"{_AZURE}, code",
    ),
    _spec(
        "summarise-long",
        5.0,
        Poisson(),
        OneShot(fitted.SUMMARISE),
        "Papers of up to 4 000 tokens to be summarised.",
        "arXiv summarisation lengths from Vidur (MIT); arrivals assumed Poisson",
    ),
    _spec(
        "multi-turn-chat",
        3.4,
        Poisson(),
        _TALK,
        "Conversations of long contexts, minutes between turns; a system prompt of 880 tokens.",
        f"{_MOONCAKE}, conversation",
    ),
    _spec(
        "doc-qa",
        3.91,
        Poisson(),
        _DOCUMENTS,
        "Long documents asked about 2 to 24 times, among short and long one-off questions.",
        f"{_MOONCAKE}, synthetic",
    ),
    _spec(
        "tool-agents",
        2.9,
        Poisson(),
        _TOOLS,
        "Two tool prompts of 6 144 and 2 560 tokens, short tails, answers of a few tokens.",
        f"{_MOONCAKE}, arXiv, the two tool prompts; arrivals assumed Poisson",
    ),
    _spec(
        "reasoning",
        16.0,
        GammaRenewal(2.0),
        OneShot(fitted.REASONING),
        "Short prompts, long answers (median 800 tokens, mean 1 500).",
        "ServeGen deepseek-r1 (Apache-2.0)",
    ),
    _spec(
        "rag",
        10.0,
        Poisson(),
        _RAG,
        "64 shared prompts of 1 000 to 4 000 tokens with Zipf popularity, short private tails.",
        "a design choice; answers as chat",
    ),
    _spec(
        "agents",
        8.0,
        Poisson(),
        _AGENTS,
        "Agent loops of 5 to 20 calls a second apart over one of 8 long tool prompts.",
        "a design choice",
    ),
    _spec(
        "sessions-hot",
        7.0,
        Poisson(),
        _HOT,
        "Conversations of 1 000 to 6 000 tokens with 10 s between turns: affinity decides.",
        "a design choice: at 18 s per turn, 7 requests/s keep 4 x 32 sessions live",
    ),
    _spec(
        "coding-agents",
        4.0,
        Poisson(),
        _CODING,
        "Coding agents: contexts of 20 000 to 500 000 tokens, dozens of turns, long pauses.",
        "lengths and pauses after public recordings of coding agents; a design choice",
    ),
)

#: Targets of requests for which nobody waits: first token, and per token, s.
_BATCH_TARGETS = (60.0, 0.5)


def _classed(
    name: str,
    description: str,
    rate_rps: float,
    parts: tuple[tuple[RequestClass, str, float], ...],
) -> WorkloadSpec:
    """Return a workload of classes, each with the traffic of a workload and its share."""
    known = {spec.name: spec.parts[0] for spec in _SIMPLE}
    return WorkloadSpec(
        name,
        description,
        "composition of the others; classes and targets are a design choice",
        rate_rps,
        # A name of its own: parts of the same name would draw the same numbers.
        tuple(
            Part(f"{name} {c.name}", known[of].arrivals, known[of].content, share, c)
            for c, of, share in parts
        ),
    )


_CLASSED = (
    _classed(
        "chat-and-batch",
        "Urgent chat (60 %) beside papers to be summarised in a batch (40 %).",
        6.0,
        (
            (RequestClass("interactive", priority=1), "chat", 0.6),
            (RequestClass("batch", 0, -1, *_BATCH_TARGETS), "summarise-long", 0.4),
        ),
    ),
    _classed(
        "agents-and-batch",
        "Urgent agents (80 %), which need their caches, beside papers in a batch (20 %).",
        8.0,
        (
            (RequestClass("interactive", priority=1), "agents", 0.8),
            (RequestClass("batch", 0, -1, *_BATCH_TARGETS), "summarise-long", 0.2),
        ),
    ),
    _classed(
        "two-tenants",
        "A tenant with steady chat (50 %) beside one that sends code in large bursts (50 %).",
        6.0,
        (
            (RequestClass("steady", tenant=0), "chat", 0.5),
            (RequestClass("bursty", tenant=1), "code-completion", 0.5),
        ),
    ),
    _classed(
        "deadlines",
        "Chat due in 0.5 s (50 %), retrieval in 3 s (25 %) and papers in 15 s (25 %).",
        6.0,
        (
            (RequestClass("due-0.5s", ttft_slo_s=0.5), "chat", 0.5),
            (RequestClass("due-3s", ttft_slo_s=3.0), "rag", 0.25),
            (RequestClass("due-15s", ttft_slo_s=15.0), "summarise-long", 0.25),
        ),
    ),
    _classed(
        "all-classes",
        "Two tenants with urgent chat and hot conversations, retrieval due in 5 s, and a batch.",
        7.0,
        (
            (RequestClass("interactive", 1, 0), "chat", 0.3),
            (RequestClass("interactive-sessions", 1, 1), "sessions-hot", 0.3),
            (RequestClass("due-5s", 0, 0, 5.0), "rag", 0.2),
            (RequestClass("batch", 0, 1, *_BATCH_TARGETS), "summarise-long", 0.2),
        ),
    ),
)

BUILT_IN: tuple[WorkloadSpec, ...] = (
    *_SIMPLE,
    mix(
        "mixed",
        "40 % chat, 20 % code, 15 % conversations, 10 % tools, and 5 % each of three others.",
        "composition of the others; a design choice",
        5.0,
        {
            "chat": 0.40,
            "code-completion": 0.20,
            "multi-turn-chat": 0.15,
            "tool-agents": 0.10,
            "chat-oneshot": 0.05,
            "reasoning": 0.05,
            "summarise-long": 0.05,
        },
        _SIMPLE,
    ),
    *_CLASSED,
)
