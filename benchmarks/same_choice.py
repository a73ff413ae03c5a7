"""Whether our rules choose what the programs choose that they imitate: share of equal decisions.

    python benchmarks/same_choice.py [--program smg ...] [--decisions 600] [--json]

A program routes to puppet servers (puppets.py), which hold requests until they are released, so
that its requests in flight, the prompts it has sent and the load reports it has read are known. The
same sequence is entered into the state of our router, with the program's own choices, and before
each request our rule is asked. A choice among the replicas that our rule holds equal counts as the
same; the share of such ties is printed. Rules that hash cannot know the other's hash function: a
key's owner is learned from its first request and given to our rule. Of random rules (power of two)
the two draws are not known: a choice is wrong if it loses against every other replica, and how
often each rank is taken is compared with what two draws give (chi-squared). The power of two of
sglang-router and vllm-router compares the load that servers report at /get_load, as SGLang's do
(vllm-router expects the format of older versions); without that report, as from vLLM's servers, it
chooses at random, which is measured as a case of its own.

The traffic: conversations that grow, over shared system prompts, with requests in flight going up
and down; then one hot prompt, until the thresholds of load are passed; then the rest again. Texts
part at multiples of 256 bytes and with their first character, because our index counts blocks and
theirs characters: with --unaligned they part anywhere, and two prompts have a chance character or
two in common. Needs the extra `serve`; programs as for live_rivals.py. Dynamo is asked by
same_choice_dynamo.py.
"""

import argparse
import asyncio
import itertools
import json
import random
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from scipy import stats

from puppets import SETTLE_S, Load, Puppets, send
from router_rig import PEER_VERSIONS, rig
from tailrace.policy import registry
from tailrace.policy.rules.hashing import FIRST_HASH, draw
from tailrace.router.decide.chooser import Chooser, ChooserSettings
from tailrace.router.intake.prompt_blocks import BLOCK_BYTES
from tailrace.router.intake.request_body import RequestBody
from tailrace.router.settings import BackendSettings
from tailrace.router.state.arrival import Arrival
from tailrace.router.state.attempt import Attempt
from tailrace.router.state.cluster import ClusterState
from tailrace.terminal.tables import Column, print_columns

SERVERS = 4
SYSTEM_PROMPTS = 6
SYSTEM_CHARS = 2400
POLL_S = 1
#: Kinds that draw two replicas and take the better one.
PAIRS = ("pair", "reported pair")
#: Expected share of each rank: the better of two distinct ones of four, or any.
RANKS = {**dict.fromkeys(PAIRS, (1 / 2, 1 / 3, 1 / 6, 0.0)), "random": (1 / 4,) * SERVERS}
#: Time that a program gets to take in a load report, s.
REPORT_S = 0.1


class Case(NamedTuple):
    """A policy of a program, and the rule of ours that imitates it."""

    program: str
    options: tuple[str, ...]
    rule: str
    kind: str = "scores"
    """scores, order (round robin), owner (hashing), prefix owner, pair (the better of two random
    ones), reported pair (by the tokens that servers report), or random."""


_SMG = ("--load-monitor-interval", str(POLL_S), "--policy")
_PAIR = ("--worker-startup-check-interval", str(POLL_S), "--policy", "power_of_two")
CASES = {
    "sglang-router cache_aware": Case("sglang-router", (), "sglang_cache_aware"),
    "sglang-router round_robin": Case(
        "sglang-router", ("--policy", "round_robin"), "round_robin", "order"
    ),
    "sglang-router power_of_two": Case(
        "sglang-router", _PAIR, "least_outstanding", "reported pair"
    ),
    "sglang-router power_of_two without load reports": Case(
        "sglang-router", _PAIR, "random", "random"
    ),
    "vllm-router cache_aware": Case("vllm-router", (), "sglang_cache_aware"),
    "vllm-router round_robin": Case(
        "vllm-router", ("--policy", "round_robin"), "round_robin", "order"
    ),
    "vllm-router power_of_two": Case("vllm-router", _PAIR, "least_outstanding", "reported pair"),
    "vllm-router power_of_two without load reports": Case("vllm-router", _PAIR, "random", "random"),
    "vllm-router consistent_hash": Case(
        "vllm-router", ("--policy", "consistent_hash"), "rendezvous_hash", "owner"
    ),
    "smg cache_aware": Case("smg", (*_SMG, "cache_aware"), "smg_cache_aware"),
    "smg least_load": Case("smg", (*_SMG, "least_load"), "smg_expected_wait"),
    "smg power_of_two": Case("smg", (*_SMG, "power_of_two"), "smg_expected_wait", "pair"),
    "smg prefix_hash": Case("smg", (*_SMG, "prefix_hash"), "smg_prefix_hash", "prefix owner"),
    "smg round_robin": Case("smg", (*_SMG, "round_robin"), "round_robin", "order"),
    "nginx least_conn": Case("nginx least_conn", (), "least_outstanding"),
    "nginx": Case("nginx", (), "round_robin", "order"),
}


class Ours:
    """Our router's state, fed with what the program did."""

    def __init__(self, rule: str, urls: list[str]) -> None:
        backends = [BackendSettings(url=url) for url in urls]
        self.cluster = ClusterState(backends, time.monotonic, learn_speeds=False)
        self.chooser = Chooser(self.cluster, ChooserSettings(policy=rule, limit_ms=1e6))
        self.policy = registry.get(rule)
        self.open: dict[int, Attempt] = {}

    def arrive(self, prompt: str, session: str) -> Arrival:
        """Take a request in."""
        asked = RequestBody("completion", text=prompt, streams=True, session=session or None)
        return self.cluster.arrive(asked)

    def sent(self, number: int, arrival: Arrival, decision: Any, replica: int) -> None:
        """The program has sent a request to a replica."""
        self.open[number] = Attempt(self.cluster, arrival, replica, decision)

    def ended(self, number: int) -> None:
        """A request has been answered."""
        attempt = self.open.pop(number)
        attempt.tokens(1)
        attempt.close("done")

    @property
    def in_flight(self) -> list[int]:
        """Requests in flight of each replica."""
        return [int(n) for n in self.cluster.replicas["in_flight"]]


class Traffic:
    """Prompts of conversations, and how many requests should be in flight."""

    def __init__(self, seed: int, decisions: int, *, aligned: bool) -> None:
        self._random = random.Random(seed)
        self._aligned = aligned
        self._first_chars = map(chr, itertools.count(0x4E00))
        self._systems = [self._words(SYSTEM_CHARS) for _ in range(SYSTEM_PROMPTS)]
        self._talks: list[str] = []
        self.decisions = decisions

    def _words(self, chars: int) -> str:
        """Return a text of about this many characters; if aligned, of whole blocks of bytes."""
        first = ""
        if self._aligned:
            first = next(self._first_chars)
            chars = max(1, round(chars / BLOCK_BYTES)) * BLOCK_BYTES - len(first.encode())
        letters = self._random.choices("abcdefghijklmnopqrstuvwxyz ", k=chars)
        return first + "".join(letters)

    def prompt(self, i: int) -> tuple[str, str]:
        """Return the prompt of decision ``i`` and its session."""
        rng = self._random
        if self.is_hot(i) and rng.random() < 0.9:
            return self._systems[0] + self._words(200), f"hot{i}"
        if self._talks and rng.random() < 0.6:
            k = rng.randrange(max(0, len(self._talks) - 12), len(self._talks))
        else:
            k = len(self._talks)
            system = rng.choice(self._systems) if rng.random() < 0.6 else ""
            self._talks.append(system + self._words(rng.randrange(200, 3000)))
        self._talks[k] += self._words(rng.randrange(50, 1500))
        return self._talks[k], f"s{k}"

    def is_hot(self, i: int) -> bool:
        """Whether one prompt is sent again and again, and nothing ends."""
        return 0.5 <= i / self.decisions < 0.75

    def level(self, i: int) -> int:
        """Requests that should be in flight before decision ``i``."""
        if self.is_hot(i):
            return 10**6
        return int(20 + 20 * np.sin(i / 23.0) + self._random.randrange(6))


async def play(name: str, traffic: Traffic, seed: int) -> dict[str, Any]:
    """Let a program decide, and our rule beside it."""
    case = CASES[name]
    tokens = 0 if case.kind == "reported pair" else None
    puppets = Puppets([Load(tokens=tokens) for _ in range(SERVERS)])
    if case.program == "vllm-router":
        puppets.load_report = lambda tokens: {"load": tokens}
    await puppets.start()
    with rig() as made:
        made.backends = puppets.urls
        loop = asyncio.get_running_loop()
        peer = await loop.run_in_executor(None, made.start_peer, case.program, case.options)
        if peer is None:
            return {"missing": made.notes}
        ours = Ours(case.rule, puppets.urls)
        if case.program == "smg" or case.kind == "reported pair":
            report = _reporter if case.program == "smg" else _token_reporter
            puppets.polled = report(ours, puppets)
            await asyncio.sleep(2.5 * POLL_S)  # its first reports
        run = _Run(case, puppets, ours, peer.port, traffic, seed)
        await run.warm_up()
        for i in range(traffic.decisions):
            await run.decide(i)
        return run.result()


def _reporter(ours: Ours, puppets: Puppets) -> Callable[[int], None]:
    """Report as many running as the server holds, and enter the report into our state."""

    def polled(server: int) -> None:
        load = puppets.loads[server]
        ours.cluster.scraped(server, load.waiting, load.running, load.kv_used)
        puppets.polled_at = time.monotonic()
        holds = ours.in_flight[server]
        load.running, load.waiting = min(holds, 24), min(max(0, holds - 24), 7)
        load.kv_used = min(0.75, holds / 80)

    return polled


def _token_reporter(ours: Ours, puppets: Puppets) -> Callable[[int], None]:
    """Report tokens in proportion to the requests held; no two servers ever report the same."""

    def polled(server: int) -> None:
        load = puppets.loads[server]
        assert load.tokens is not None
        puppets.told[server] = load.tokens
        puppets.polled_at = time.monotonic()
        load.tokens = 1000 * ours.in_flight[server] + server

    return polled


class _Run:
    """One program under way."""

    def __init__(
        self, case: Case, puppets: Puppets, ours: Ours, port: int, traffic: Traffic, seed: int
    ) -> None:
        self._case, self._puppets, self._ours, self._port = case, puppets, ours, port
        self._traffic, self._random = traffic, random.Random(seed)
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._owners: dict[str, int] = {}
        self._order: list[int] = []
        self._last = -1
        self._doubtful_report = -1.0
        self.same = self.ties = self.asked = self.raced = 0
        self.ranks = [0] * SERVERS  #: how often each rank was taken, where no two are equal
        self.different: list[dict[str, Any]] = []

    async def warm_up(self) -> None:
        """Learn the order in which a program takes turns."""
        if self._case.kind != "order":
            return
        for i in range(2 * SERVERS):
            number, replica = await self._send(10**8 + i, f"warm up {i} " * 30, f"w{i}")
            self._order.append(replica)
            await self._release(number, enter=False)
        self._order, self._last = self._order[-SERVERS:], self._order[-1]

    async def _send(self, number: int, prompt: str, session: str) -> tuple[int, int]:
        self._tasks[number] = asyncio.create_task(send(self._port, number, prompt, session))
        return await self._puppets.arrival()

    async def _release(self, number: int, *, enter: bool = True) -> None:
        self._puppets.release(number)
        await self._tasks.pop(number)
        if enter:
            self._ours.ended(number)

    async def decide(self, i: int) -> None:
        """Send one request through the program, and ask our rule what it would do."""
        ours, case = self._ours, self._case
        prompt, session = self._traffic.prompt(i)
        excess = len(ours.open) - self._traffic.level(i)
        if excess > 0:
            for number in self._random.sample(sorted(ours.open), excess):
                await self._release(number)
            await asyncio.sleep(SETTLE_S)
        while (since := time.monotonic() - self._puppets.polled_at) < REPORT_S:
            await asyncio.sleep(REPORT_S - since)
        polled_at = self._puppets.polled_at
        key = session if case.kind == "owner" else prompt[:1024]
        arrival = ours.arrive(prompt, session)
        if case.kind == "prefix owner":
            if key not in self._owners:
                await self._learn_owner(i, key, prompt, session)
            hashed = _hash_of(self._owners[key], i)
            arrival.runs = arrival.runs._replace(prefix_hash=hashed)
        decision = ours.chooser.choose(arrival)
        assert decision is not None
        scores = decision.scores
        if case.kind == "reported pair":
            scores = np.array(self._puppets.told, np.float64)
        elif case.kind == "random":
            scores = np.array(ours.in_flight, np.float64)
        best = self._best(scores, key)
        number, replica = await self._send(i, prompt, session)
        ours.sent(number, arrival, decision, replica)
        self._last = replica
        if case.kind == "owner" and key not in self._owners:
            self._owners[key] = replica
            return
        if polled_at != self._puppets.polled_at:
            # A report came while the request was sent: does it count as sent since, or not?
            self._doubtful_report = self._puppets.polled_at
        if self._doubtful_report == self._puppets.polled_at:
            self.raced += 1
            return
        self.asked += 1
        self.ties += len(best) > 1
        self.same += replica in best
        if len(set(scores.tolist())) == SERVERS:
            self.ranks[int((scores < scores[replica]).sum())] += 1
        if replica not in best:
            state = {"decision": i, "took": replica, "ours": best, "hot": self._traffic.is_hot(i)}
            state["in_flight"] = ours.in_flight
            state["scores"] = np.round(scores, 4).tolist()
            self.different.append(state)

    async def _learn_owner(self, i: int, key: str, prompt: str, session: str) -> None:
        """Ask the program with nothing in flight: then the owner gets the request."""
        for number in list(self._ours.open):
            await self._release(number)
        await asyncio.sleep(SETTLE_S)
        number, replica = await self._send(10**8 + i, prompt, session)
        self._owners[key] = replica
        await self._release(number, enter=False)
        await asyncio.sleep(SETTLE_S)

    def _best(self, scores: np.ndarray[Any, np.dtype[np.float64]], key: str) -> list[int]:
        """Replicas that our rule holds to be the best, given what is known of the program."""
        if self._case.kind == "order":
            return [self._order[(self._order.index(self._last) + 1) % SERVERS]]
        if self._case.kind == "owner":
            return [self._owners[key]] if key in self._owners else list(range(SERVERS))
        if self._case.kind == "random":
            return list(range(SERVERS))
        if self._case.kind in PAIRS:
            worst = np.flatnonzero(scores == scores.max())
            return [r for r in range(SERVERS) if len(worst) > 1 or r != worst[0]]
        return [int(r) for r in np.flatnonzero(scores == scores.min())]

    def result(self) -> dict[str, Any]:
        """Return counts, and some of the states in which the two differ."""
        return {
            "rule": self._case.rule,
            "kind": self._case.kind,
            "version": PEER_VERSIONS.get(self._case.program),
            "decisions": self.asked,
            "same": self.same,
            "ties": self.ties,
            "left_out": self.raced,
            "share": self.same / max(1, self.asked),
            "different": self.different[:20],
            **self._ranks(),
        }

    def _ranks(self) -> dict[str, Any]:
        """How often the best, second best, ... was taken, and whether chance explains it."""
        expected = RANKS.get(self._case.kind)
        total = sum(self.ranks)
        if expected is None or total < 20:
            return {}
        if self.ranks[-1] and not expected[-1]:
            return {"ranks": self.ranks, "ranks_p": 0.0}
        seen, wanted = zip(
            *((n, total * share) for n, share in zip(self.ranks, expected, strict=True) if share),
            strict=True,
        )
        return {"ranks": self.ranks, "ranks_p": float(stats.chisquare(seen, wanted).pvalue)}


def _hash_of(owner: int, i: int) -> int:
    """Return a hash whose owner is a given replica, by our rule."""
    for value in range(10_000):
        hashed = np.uint64(value + 10_000 * i)
        draws = [draw(hashed, r, FIRST_HASH) for r in range(SERVERS)]
        if int(np.argmax(draws)) == owner:
            return int(hashed)
    raise AssertionError("no replica owns nothing")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", action="append", choices=CASES, help="default: all")
    parser.add_argument("--decisions", type=int, default=600)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--unaligned", action="store_true", help="texts that part anywhere")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    found: dict[str, Any] = {}
    for name in given.case or CASES:
        print(f"{name} ...", file=sys.stderr, flush=True)
        traffic = Traffic(given.seed, given.decisions, aligned=not given.unaligned)
        found[name] = asyncio.run(play(name, traffic, given.seed))
    if given.json:
        print(json.dumps(found, indent=1))
        return
    done = {name: row for name, row in found.items() if "share" in row}
    rows = list(done.values())
    print_columns(
        Console(width=120),
        [
            Column(("", "program"), list(done), left=True),
            Column(("", "our rule"), [row["rule"] for row in rows], left=True),
            Column(("", "compared by"), [row["kind"] for row in rows], left=True),
            Column(("", "decisions"), [str(row["decisions"]) for row in rows]),
            Column(("", "same"), [f"{row['share']:.1%}" for row in rows]),
            Column(("of them", "ties"), [str(row["ties"]) for row in rows]),
            Column(
                ("ranks:", "p"),
                [f"{row['ranks_p']:.2f}" if "ranks_p" in row else "" for row in rows],
            ),
        ],
    )
    for name, row in found.items():
        for note in row.get("missing", ()):
            print(f"{name}: {note}", file=sys.stderr)


if __name__ == "__main__":
    main()
