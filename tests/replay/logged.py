"""A decision log of simulated traffic, written by the router's own ClusterState and DecisionLog."""

import heapq

import numpy as np

from router.clusters import Clock, backends, new_chooser
from tailrace.bench.prompts import PromptWriter
from tailrace.router.intake.request_body import RequestBody
from tailrace.router.observe.decision_log import DecisionLog, DecisionLogSettings
from tailrace.router.state.attempt import Attempt
from tailrace.router.state.cluster import ClusterState
from tailrace.sim.simulator import simulate

START_S = 1000.0


def write_log(folder, cluster, table, policy="least_outstanding", overhead_s=0.0, jitter_s=0.0):
    """Simulate a table and log it as if a router had served it; returns the simulation's result.

    ``overhead_s`` passes before an answer begins to come in, ``jitter_s`` is the mean of a random
    delay more.
    """
    result = simulate(cluster, table, policy)
    done, rows = result.requests, table.rows
    writer, clock = PromptWriter(table), Clock(START_S)
    state = ClusterState(backends(*cluster.expanded()), clock)
    chooser = new_chooser(state)
    log = DecisionLog(DecisionLogSettings(folder=folder), b"s" * 32, clock_now=START_S)
    rng = np.random.default_rng(0)
    late = overhead_s + rng.exponential(jitter_s or 1e-12, (len(table), 2))
    events = []
    for row in range(len(table)):
        arrived, first, last = (
            float(done[name][row]) for name in ("arrived_s", "first_token_s", "finished_s")
        )
        first, last = first + float(late[row, 0]), last + float(late[row, 1])
        events += [(arrived, 0, row), (first, 1, row), (max(first, last), 2, row)]
    heapq.heapify(events)
    attempts = {}
    while events:
        at, kind, row = heapq.heappop(events)
        clock.now = START_S + at
        if kind == 0:
            text = writer.write(row).text().decode()
            asked = RequestBody("chat", "m", text=text, streams=True)
            if rows["session"][row] >= 0:
                asked.session = f"session {rows['session'][row]}"
            before = int(rows["parent"][row])
            if before >= 0:
                begun = int(rows["prompt_tokens"][before])
                ended = begun + int(rows["output_tokens"][before])
                asked.answer = (4 * begun, 4 * ended)
            arrival = state.arrive(asked, prompt_tokens=int(rows["prompt_tokens"][row]))
            replica = int(done["replica"][row])
            decision = chooser.choose(arrival, [r for r in range(len(state)) if r != replica])
            decision.policy = policy
            attempts[row] = Attempt(state, arrival, replica, decision)
        elif kind == 1:
            attempts[row].tokens(1)
        else:
            attempt = attempts.pop(row)
            prompt, output = int(rows["prompt_tokens"][row]), int(rows["output_tokens"][row])
            attempt.usage(prompt, output, int(done["cached_tokens"][row]))
            attempt.close("done")
            log.write(attempt, "done")
    log.close()
    assert (log.written, log.dropped) == (len(table), 0), log.last_error
    return result
