"""What must hold of a simulated cluster between any two decisions."""

from collections import Counter

import numpy as np

from tailrace.sim.kvcache import ROW_EXTENTS, ROW_GROWING, ROW_HEAD, ROW_NAMED
from tailrace.sim.simulator import Simulation
from tailrace.sim.types import RUNNING, SLOT_OFFSET, SLOT_REQUEST, SLOT_ROW, WAITING


def check_books(simulation: Simulation) -> None:
    """KV blocks are neither lost nor used twice, and every request is in one place."""
    fleet, _ = simulation.arrays
    states = fleet.requests[0]
    for r, server in enumerate(fleet.servers[0]):
        held = server["num_blocks"] - server["free_blocks"]
        assert 0 <= held <= server["num_blocks"]
        residents = fleet.slots[0, r, 0, : server["n_slots"]]
        assert (states["status"][residents] == RUNNING).all()
        assert len(set(residents)) == server["n_slots"] <= server["batch_cap"]
        waiting = queued(server, states)
        assert (states["status"][waiting] == WAITING).all()
        assert len(set(waiting)) == server["queue_len"] == len(waiting)
        if server["busy"]:
            assert server["steps"] >= 1
            assert server["until"] > server["start"]
        view = fleet.replicas_view[0, r]
        assert view["in_flight"] == server["n_slots"] + server["queue_len"]
        assert 0 <= view["queued"] <= view["in_flight"]
        if server["caching"]:
            check_cache(fleet, r, server)


def queued(server, states) -> list[int]:  # type: ignore[no-untyped-def]
    """Waiting requests of a server: a list or, by priority, a heap."""
    found: list[int] = []
    ahead = [int(server["queue_head"])] if server["queue_len"] else []
    while ahead:
        request = ahead.pop()
        found.append(request)
        assert len(found) <= len(states), "the queue is a circle"
        links = ("next", "child") if server["ordered"] else ("next",)
        ahead += [int(states[link][request]) for link in links if states[link][request] >= 0]
    return found


def check_cache(fleet, r: int, server) -> None:  # type: ignore[no-untyped-def]
    """Every block is in one extent, with as many holders as rows list it."""
    extents = fleet.extents[0, r].copy()
    refs: Counter[int] = Counter()
    nameless = 0
    growing = 0
    for i in range(server["n_slots"]):
        slot = fleet.slots[0, r, :, i]
        row = fleet.held[0, r, slot[SLOT_ROW]]
        named = int(row[ROW_NAMED])
        blocks = int(fleet.requests[0][slot[SLOT_REQUEST]]["blocks"])
        if i < server["n_decodes"]:
            # Iterations are formed lazily: at a decision, the running one has got its blocks.
            reached = int(slot[SLOT_OFFSET] + server["reached"])
            # The block of a first output token is taken with the next one.
            reached -= reached == fleet.requests[0][slot[SLOT_REQUEST]]["prompt"] + 1
            blocks = max(blocks, -(-reached // int(server["block_size"])))
        if e := row[ROW_GROWING]:
            growing += 1
            assert extents[e]["refs"] == 1
            assert not any(extents[e][link] for link in ("after", "older", "younger"))
            named = reached // int(server["block_size"])
            extents[e]["count"] = named - extents[e]["first"]
        nameless += blocks - named
        e, covered = 0, 0
        listed = row[ROW_HEAD : ROW_HEAD + row[ROW_EXTENTS]]
        starts = {int(extents[x]["first"]): int(x) for x in listed}
        while covered < named:
            e = starts.get(covered, int(extents[e]["rest"]))
            assert extents[e]["first"] == covered
            covered += int(extents[e]["count"])
            refs[e] += 1
        assert covered == named
    free, e = [], int(extents[0]["next"])
    while e:
        assert extents[e]["refs"] == 0
        free.append(e)
        assert len(free) <= server["num_blocks"], "the free list is a circle"
        e = int(extents[e]["next"])
    assert extents["count"][free].sum() == server["free_blocks"]
    assert not refs.keys() & set(free)
    assert all(extents[e]["refs"] == count for e, count in refs.items())
    held = sum(int(extents[e]["count"]) for e in refs)
    assert held + nameless + server["free_blocks"] == server["num_blocks"]
    found = set()
    for head in fleet.buckets[0, r]:
        end = 0
        while head:
            assert extents[head]["first"] >= end
            end = extents[head]["first"] + extents[head]["count"]
            twin = head
            while twin:
                same = ["chain", "first", "count"]
                assert extents[twin][same] == extents[head][same]
                found.add(int(twin))
                twin = extents[twin]["younger"]
            head = extents[head]["after"]
    assert found == {*refs, *(e for e in free if extents[e]["chain"] >= 0)}
    assert np.count_nonzero(extents["grower"][list(refs)]) == growing
