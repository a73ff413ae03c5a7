"""An emulated replica without sockets and without waiting: a virtual clock and a transport."""

import heapq
import itertools

import orjson

from tailrace.bench.prompts import PromptWriter, spoken
from tailrace.config import Cluster
from tailrace.emulate import replica as replicas
from tailrace.emulate.metrics import Meter
from tailrace.emulate.request_body import Served
from tailrace.emulate.service import EmulatedService, max_model_len
from tailrace.view.devices import resolved


class VirtualClock:
    """Time that passes only between calls. At one moment: timers in order, then what is soon."""

    def __init__(self):
        self._now = 0.0
        self._timers = []
        self._soon = []
        self._order = itertools.count()

    def now(self):
        return self._now

    def call_at(self, at_s, callback):
        timer = [max(at_s, self._now), next(self._order), callback]
        heapq.heappush(self._timers, timer)
        return Timer(timer)

    def call_soon(self, callback):
        self._soon.append(callback)

    def run(self, until=float("inf")):
        """Let everything happen up to ``until`` (s)."""
        while True:
            while self._timers and self._timers[0][0] <= self._now:
                callback = heapq.heappop(self._timers)[2]
                if callback is not None:
                    callback()
            if self._soon:
                soon, self._soon = self._soon, []
                for callback in soon:
                    callback()
            elif self._timers and self._timers[0][0] <= until:
                self._now = self._timers[0][0]
            else:
                self._now = self._now if until == float("inf") else until
                return


class Timer:
    def __init__(self, entry):
        self._entry = entry

    def cancel(self):
        self._entry[2] = None


class Wire:
    """A transport that keeps what is written, with the time it was."""

    def __init__(self, clock):
        self._clock = clock
        self.writes = []
        self.is_closed = False

    def write(self, data):
        self.writes.append((self._clock.now(), bytes(data)))

    def close(self):
        self.is_closed = True

    def abort(self):
        self.is_closed = True

    def is_closing(self):
        return self.is_closed

    def can_write_eof(self):
        return True

    def write_eof(self):
        self.is_closed = True

    def pause_reading(self):
        pass

    def resume_reading(self):
        pass

    @property
    def sent(self):
        return b"".join(data for _, data in self.writes)


def new_replica(config, clock, number=0):
    (config,) = resolved(Cluster(replicas=(config,)))
    return replicas.EmulatedReplica(number, config, clock, Meter())


def new_service(config, clock, **options):
    replica = new_replica(config, clock)
    most, merged = options.pop("max_tokens", None), options.pop("per_event", 1)
    served = Served("tiny", most or max_model_len(replica.config), tokens_per_event=merged)
    return EmulatedService(replica, served, old_names=options.get("old_names", False))


def post(path, body):
    """The bytes of a request; a dict is sent as JSON."""
    if not isinstance(body, bytes):
        body = orjson.dumps(body)
    return (
        b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%b" % (path.encode(), len(body), body)
    )


def get(path):
    return b"GET %b HTTP/1.1\r\nhost: x\r\n\r\n" % path.encode()


def connect(service, clock):
    """A client connection; must be called inside an event loop."""
    connection, wire = service.connect(), Wire(clock)
    connection.connection_made(wire)
    return connection, wire


def unchunked(data):
    """Head and body of a chunked response; checks the framing."""
    head, _, rest = data.partition(b"\r\n\r\n")
    assert b"transfer-encoding: chunked" in head
    parts = []
    while True:
        size, _, rest = rest.partition(b"\r\n")
        size = int(size, 16)
        if size == 0:
            assert rest == b"\r\n"
            return head, b"".join(parts)
        assert rest[size : size + 2] == b"\r\n"
        parts.append(rest[:size])
        rest = rest[size + 2 :]


def events(body):
    """The JSON values of a stream of events, which must end in [DONE]."""
    lines = body.decode().split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    assert all(line.startswith("data: ") for line in lines[:-1])
    return [orjson.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def play(service, clock, table):
    """Send the requests of a table at its times, sessions included; returns times by row.

    Each row is (first token, last token, cached tokens), read from what came over the wire.
    """
    writer = PromptWriter(table)
    rows = table.rows
    child = {int(p): k for k, p in enumerate(rows["parent"]) if p >= 0}
    so_far, wires = {}, {}

    def send(row):
        prompt = writer.write(row, so_far.get(row))
        body = {
            "prompt": prompt.text().decode(), "max_tokens": int(rows["output_tokens"][row]),
            "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True,
        }  # fmt: skip
        connection, wire = connect(service, clock)
        wires[row] = wire
        end = connection.end

        def ended(*, keep):
            end(keep=keep)
            answer = "".join(e["choices"][0]["text"] for e in _events(wire) if e["choices"])
            if row in child:
                after = child[row]
                tokens = int(rows["output_tokens"][row])
                so_far[after] = spoken(prompt, answer.encode(), tokens)
                clock.call_at(clock.now() + float(rows["think_s"][after]), lambda: send(after))

        connection.end = ended
        connection.data_received(post("/v1/completions", body))

    for row in range(len(table)):
        if rows["parent"][row] < 0:
            clock.call_at(float(rows["arrival_s"][row]), lambda row=row: send(row))
    clock.run()
    return [_times(wires[row]) for row in range(len(table))]


def _events(wire):
    return events(unchunked(wire.sent)[1])


def _times(wire):
    times = [time for time, data in wire.writes if b"data: " in data]
    usage = _events(wire)[-1]["usage"]
    return times[0], times[-1], usage["prompt_tokens_details"]["cached_tokens"]
