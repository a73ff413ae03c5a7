"""Traffic for servers that have none: conversations that return after some seconds."""

import math
from pathlib import Path
from typing import Any

from tailrace.workload import library, request_file
from tailrace.workload.arrivals import Poisson
from tailrace.workload.catalogue import lognormal
from tailrace.workload.compose import Part, WorkloadSpec
from tailrace.workload.content import PromptPool
from tailrace.workload.sessions import Conversations, Think, UniformTurns

#: Pause between two turns of a conversation, median in s: short, so that a short load has several.
PAUSE_S = 2.0


def conversations(shrink: float) -> WorkloadSpec:
    """Hot conversations, as `sessions-hot` but with shorter pauses, and shrunk."""

    def tokens(median: float, sigma: float, low: float, high: float) -> Any:
        least = max(2, round(low / shrink))
        return lognormal(median / shrink, sigma, least, max(least + 1, round(high / shrink)))

    content = Conversations(
        pool=PromptPool(16, tokens(500, 0.4, 200, 1200), zipf=1.0),
        first=tokens(450, 0.7, 30, 2500),
        user=tokens(90, 1.0, 5, 1500),
        output=tokens(150, 0.6, 8, 800),
        prompt_cap=round(8192 / shrink),
        turns=UniformTurns(6, 14),
        mean_turns=10.0,
        think=Think(mu=math.log(PAUSE_S), sigma=0.8),
        warmup_s=120.0,
    )
    part = Part("conversations", Poisson(), content)
    about = "Conversations with 2 s between turns."
    return WorkloadSpec("conversations", about, "a design choice", 7.0, (part,))


def write_load(path: Path, requests: int, rate: float, seed: int, shrink: float = 1.0) -> Path:
    """Write a load; ``rate`` in requests/s, prompts and answers ``shrink`` times shorter."""
    request_file.write(library.make(conversations(shrink), requests, rate, seed), path)
    return path
