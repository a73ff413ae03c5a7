"""What an emulated server says: streams, replies, errors, metrics."""

import asyncio

import orjson
import pytest

from emulate.virtual import VirtualClock, connect, events, get, new_service, post, unchunked
from tailrace.config import Replica
from tailrace.emulate import tokenizer
from tailrace.emulate.connection import LIMITS
from tailrace.emulate.service import max_model_len


class Talk:
    """A client connection to a service on a virtual clock."""

    def __init__(self, service, clock):
        self.clock = clock
        self.connection, self.wire = connect(service, clock)

    def send(self, data, until=float("inf")):
        """Send bytes, let things happen, return what came back."""
        before = len(self.wire.sent)
        self.connection.data_received(data)
        self.clock.run(until)
        return self.wire.sent[before:]


def talk(function, config=None, **options):
    """Run ``function(talk, service)`` inside an event loop."""

    async def run():
        clock = VirtualClock()
        service = new_service(config or Replica(), clock, **options)
        return function(Talk(service, clock), service)

    return asyncio.run(run())


def ask(path, body, **options):
    """Status and JSON of the answer to one request."""
    data = talk(lambda t, _: t.send(post(path, body) if body is not None else get(path)), **options)
    return parsed(data)


def parsed(data):
    head, _, body = data.partition(b"\r\n\r\n")
    assert f"content-length: {len(body)}".encode() in head.lower()
    return int(head.split()[1]), orjson.loads(body)


def stream(path, body, **options):
    data = talk(lambda t, _: t.send(post(path, body | {"stream": True})), **options)
    head, body = unchunked(data)
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"content-type: text/event-stream" in head
    return events(body)


def test_streamed_completion():
    options = {"stream_options": {"include_usage": True}}
    got = stream("/v1/completions", {"prompt": "abcdefghi", "max_tokens": 5, **options})
    assert len(got) == 6
    assert {event["object"] for event in got} == {"text_completion"}
    assert len({(event["id"], event["created"], event["model"]) for event in got}) == 1
    choices = [event["choices"][0] for event in got[:5]]
    assert set(choices[0]) == {
        "index", "text", "logprobs", "finish_reason", "stop_reason", "prompt_token_ids",
        "token_ids",
    }  # fmt: skip
    assert [c["finish_reason"] for c in choices] == [None] * 4 + ["length"]
    assert all(c["text"][0] == " " and c["text"][1:] in tokenizer.WORDS for c in choices)
    assert got[5]["choices"] == []
    assert got[5]["usage"] == {
        "prompt_tokens": 3, "total_tokens": 8, "completion_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 0},
    }  # fmt: skip


def test_a_busy_server_puts_several_tokens_into_one_event():
    body = {"prompt": "abcdefghi", "max_tokens": 9, "stream_options": {"include_usage": True}}
    plain, got = stream("/v1/completions", body), stream("/v1/completions", body, per_event=3)
    texts = [event["choices"][0]["text"] for event in got[:-1]]
    assert [len(text) // tokenizer.TOKEN_BYTES for text in texts] == [1, 3, 3, 2]
    assert "".join(texts) == "".join(event["choices"][0]["text"] for event in plain[:-1])
    assert got[-1]["usage"]["completion_tokens"] == 9
    assert got[-2]["choices"][0]["finish_reason"] == "length"


def test_streamed_chat():
    messages = [{"role": "user", "content": "hello"}]
    got = stream("/v1/chat/completions", {"messages": messages, "max_tokens": 3})
    assert got[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all(event["object"] == "chat.completion.chunk" for event in got)
    assert [event["choices"][0]["finish_reason"] for event in got] == [None, None, None, "length"]
    assert "usage" not in got[-1]


def test_stream_in_http_1_0_is_not_chunked_and_closes():
    def run(t, _):
        data = post("/v1/completions", {"prompt": "x", "max_tokens": 2, "stream": True})
        return t.send(data.replace(b"HTTP/1.1", b"HTTP/1.0")), t.wire.is_closed

    data, closed = talk(run)
    assert closed
    assert len(events(data.partition(b"\r\n\r\n")[2])) == 2


def test_the_head_of_a_stream_comes_before_the_first_token():
    def run(t, _):
        body = {"prompt": "x" * 400, "max_tokens": 2, "stream": True}
        return t.send(post("/v1/completions", body), until=0.001)

    assert talk(run).endswith(b"\r\n\r\n")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_answer_in_one_piece_is_the_streamed_one(path):
    body = {"max_tokens": 7, "prompt": "who?", "messages": [{"role": "user", "content": "who?"}]}
    status, whole = ask(path, body)
    assert status == 200
    pieces = [event["choices"][0] for event in stream(path, body)]
    text = "".join(c["text"] if "text" in c else c["delta"]["content"] for c in pieces)
    choice = whole["choices"][0]
    assert (choice["text"] if "text" in choice else choice["message"]["content"]) == text
    assert choice["finish_reason"] == "length"
    assert whole["usage"]["completion_tokens"] == 7


@pytest.mark.parametrize(
    ("body", "length", "reason"),
    [
        ({"max_tokens": 9}, 9, "length"),
        ({"max_completion_tokens": 9, "max_tokens": 2}, 9, "length"),
        ({}, 16, "length"),
        ({"emulate_output_tokens": 5}, 5, "stop"),
        ({"emulate_output_tokens": 5, "max_tokens": 9}, 5, "stop"),
        ({"emulate_output_tokens": 9, "max_tokens": 5}, 5, "length"),
    ],
)
def test_output_lengths(body, length, reason):
    _, got = ask("/v1/completions", {"prompt": "x", **body})
    assert got["usage"]["completion_tokens"] == length
    assert got["choices"][0]["finish_reason"] == reason


def test_output_length_from_a_header():
    def run(t, _):
        data = post("/v1/completions", {"prompt": "x", "max_tokens": 50})
        return t.send(data.replace(b"host: x\r\n", b"host: x\r\nX-Emulate-Output-Tokens: 4\r\n"))

    assert parsed(talk(run))[1]["usage"]["completion_tokens"] == 4


def test_chat_without_a_limit_draws_a_length_that_repeats():
    lengths = []
    for text in ("a", "b", "a"):
        _, got = ask("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]})
        assert got["choices"][0]["finish_reason"] == "stop"
        lengths.append(got["usage"]["completion_tokens"])
    assert lengths[0] == lengths[2] != lengths[1]


def test_prefix_hits_are_reported():
    def run(t, _):
        body = {"prompt": "x" * 400, "max_tokens": 20}
        first = parsed(t.send(post("/v1/completions", body)))[1]
        longer = {**body, "prompt": body["prompt"] + first["choices"][0]["text"] + "y" * 64}
        return [first, *(parsed(t.send(post("/v1/completions", b)))[1] for b in (body, longer))]

    cached = [got["usage"]["prompt_tokens_details"]["cached_tokens"] for got in talk(run)]
    # 100 tokens are 6 full blocks of 16; with the answer the first 120 tokens have been seen.
    assert cached == [0, 96, 112]


@pytest.mark.parametrize(
    ("path", "body", "status", "kind", "says"),
    [
        ("/v1/completions", b"{", 400, "Bad Request", "JSON"),
        ("/v1/completions", b"[1]", 400, "Bad Request", "object"),
        ("/v1/completions", b"", 400, "Bad Request", "JSON"),
        ("/v1/completions", {}, 400, "BadRequestError", "prompt"),
        ("/v1/completions", {"prompt": ""}, 400, "BadRequestError", "empty"),
        ("/v1/completions", {"prompt": ["a", "b"]}, 400, "BadRequestError", "one prompt"),
        ("/v1/completions", {"prompt": [-4]}, 400, "BadRequestError", "token ids"),
        ("/v1/completions", {"prompt": "x", "n": 2}, 400, "BadRequestError", "n must be 1"),
        ("/v1/completions", {"prompt": "x", "max_tokens": 0}, 400, "BadRequestError", "at least 1"),
        ("/v1/completions", {"prompt": "x", "max_tokens": "a"}, 400, "BadRequestError", "at least"),
        (
            "/v1/completions",
            {"prompt": "x" * 404},
            400,
            "BadRequestError",
            "maximum context length",
        ),
        (
            "/v1/completions",
            {"prompt": "x", "max_tokens": 100},
            400,
            "BadRequestError",
            "100 output",
        ),
        ("/v1/completions", {"prompt": "x", "model": "big"}, 404, "NotFoundError", "`big`"),
        ("/v1/chat/completions", {"messages": "hi"}, 400, "BadRequestError", "list"),
        ("/v1/chat/completions", {"messages": [1]}, 400, "BadRequestError", "role"),
        ("/v1/embeddings", {"input": []}, 400, "BadRequestError", "empty"),
        ("/tokenize", {}, 400, "BadRequestError", "prompt"),
        ("/detokenize", {"tokens": "x"}, 400, "BadRequestError", "token ids"),
    ],
)
def test_errors_have_the_form_of_vllm(path, body, status, kind, says):
    got_status, got = ask(path, body, max_tokens=100)
    error = got["error"]
    assert (got_status, error["code"], error["type"], error["param"]) == (
        status,
        status,
        kind,
        None,
    )
    assert says in error["message"]


def test_unknown_paths_and_methods():
    assert ask("/v1/nothing", {}) == (404, {"detail": "Not Found"})
    assert ask("/v1/completions", None) == (405, {"detail": "Method Not Allowed"})


def test_small_endpoints():
    assert ask("/version", None)[1]["version"]
    _, models = ask("/v1/models", None, max_tokens=77)
    assert (models["data"][0]["id"], models["data"][0]["max_model_len"]) == ("tiny", 77)
    data = talk(lambda t, _: t.send(get("/health")))
    assert data.startswith(b"HTTP/1.1 200 OK")
    assert b"\r\ncontent-length: 0\r\n" in data
    assert data.endswith(b"\r\n\r\n")
    _, got = ask("/v1/embeddings", {"input": ["one", "other", "one"]})
    vectors = [item["embedding"] for item in got["data"]]
    assert vectors[0] == vectors[2] != vectors[1]
    assert got["usage"]["prompt_tokens"] == 4


def test_tokenize_agrees_with_usage():
    for path, body in (
        ("/v1/completions", {"prompt": "any text you like"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "any text"}]}),
    ):
        _, counted = ask("/tokenize", body)
        _, answered = ask(path, body | {"max_tokens": 1})
        assert counted["count"] == len(counted["tokens"]) == answered["usage"]["prompt_tokens"]
    _, text = ask("/detokenize", {"tokens": ask("/tokenize", {"prompt": "näher"})[1]["tokens"]})
    assert text == {"prompt": "näher"}


def test_prompts_as_token_ids_are_the_same_prompts():
    _, counted = ask("/tokenize", {"prompt": "the same old story"})
    _, by_ids = ask("/v1/completions", {"prompt": counted["tokens"]})
    _, by_text = ask("/v1/completions", {"prompt": "the same old story"})
    assert by_ids["choices"] == by_text["choices"]


# ---- connections ------------------------------------------------------------------------------


def test_pipelined_requests_are_answered_in_order():
    async def run():
        clock = VirtualClock()
        t = Talk(new_service(Replica(), clock), clock)
        bodies = [{"prompt": "x", "max_tokens": n} for n in (5, 1)]
        data = b"".join(post("/v1/completions", body) for body in bodies) + get("/version")
        for byte in data:  # one by one: nothing depends on how bytes are grouped
            t.connection.data_received(bytes([byte]))
        for _ in range(3):
            clock.run()
            await asyncio.sleep(0)
        return t.wire.sent

    data = asyncio.run(run())
    parts = data.split(b"HTTP/1.1 200 OK")[1:]
    lengths = [orjson.loads(p.partition(b"\r\n\r\n")[2]).get("usage") for p in parts]
    assert [length and length["completion_tokens"] for length in lengths] == [5, 1, None]


def test_connection_close_is_honoured():
    def run(t, _):
        t.send(get("/version").replace(b"host: x", b"host: x\r\nconnection: close"))
        return t.wire.is_closed

    assert talk(run)


def test_expect_continue():
    def run(t, _):
        data = post("/v1/completions", {"prompt": "x"})
        head, _, body = data.partition(b"\r\n\r\n")
        t.connection.data_received(head + b"\r\nexpect: 100-continue\r\n\r\n")
        permitted = t.wire.sent
        return permitted, t.send(body)

    permitted, rest = talk(run)
    assert permitted == b"HTTP/1.1 100 Continue\r\n\r\n"
    assert rest.startswith(b"HTTP/1.1 200 OK")


@pytest.mark.parametrize("data", [b"\x00\x01\x02\r\n\r\n", b"GET\r\n\r\n", b"\x16\x03\x01\xff" * 9])
def test_what_is_not_http_is_refused_and_closed(data):
    def run(t, _):
        return t.send(data), t.wire.is_closed

    got, closed = talk(run)
    assert closed
    assert got.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 501 "))


def test_bodies_have_a_limit(monkeypatch):
    assert LIMITS.body_bytes > 2**20
    limits = LIMITS.model_copy(update={"body_bytes": 1024})
    monkeypatch.setattr("tailrace.emulate.connection.Listener.limits", limits)
    status, got = ask("/v1/completions", {"prompt": "x" * 2000})
    assert (status, got["error"]["code"]) == (413, 413)


def test_a_client_that_goes_stops_the_work():
    def run(t, service):
        body = {"prompt": "x", "max_tokens": 1000, "stream": True}
        t.send(post("/v1/completions", body), until=0.1)
        assert service.replica.running == 1
        t.connection.connection_lost(None)
        t.clock.run()
        return service

    service = talk(run)
    assert service.replica.running == 0
    assert service.replica.kv_used == 0
    assert service.replica.meter.generated_tokens < 20
    assert not service.connections


# ---- metrics ----------------------------------------------------------------------------------


def gauges(page):
    lines = [line for line in page.decode().splitlines() if not line.startswith("#")]
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}


def value(page, name, more=""):
    return gauges(page)[f'vllm:{name}{{engine="0",model_name="tiny"{more}}}']


def test_metrics_say_what_is_in_flight():
    def run(t, service):
        others = [Talk(service, t.clock) for _ in range(5)]
        body = {"prompt": "x" * 200, "max_tokens": 30}
        for other in others:
            other.connection.data_received(post("/v1/completions", body))
        t.clock.run(until=0.1)
        during = t.send(get("/metrics"), until=0.1).partition(b"\r\n\r\n")[2]
        t.clock.run()
        after = t.send(get("/metrics")).partition(b"\r\n\r\n")[2]
        return during, after

    during, after = talk(run, Replica(batch_cap=2, num_blocks=100))
    assert value(during, "num_requests_running") == 2
    assert value(during, "num_requests_waiting") == 3
    # The two share the three full blocks of their prompt; each has a block of its own.
    assert 0.03 <= value(during, "kv_cache_usage_perc") <= 0.12
    assert value(after, "num_requests_running") == value(after, "num_requests_waiting") == 0
    assert value(after, "kv_cache_usage_perc") == 0
    assert value(after, "generation_tokens_total") == 150
    assert value(after, "prefix_cache_queries_total") == value(after, "prompt_tokens_total") == 250
    assert value(after, "prefix_cache_hits_total") == 48 * 4
    assert value(after, "request_success_total", ',finished_reason="length"') == 5
    assert value(after, "time_to_first_token_seconds_count") == 5
    assert value(after, "inter_token_latency_seconds_count") == 145
    assert value(after, "e2e_request_latency_seconds_bucket", ',le="+Inf"') == 5


def test_metrics_are_what_prometheus_reads():
    from prometheus_client.parser import text_string_to_metric_families

    page = talk(lambda t, _: t.send(get("/metrics"))).partition(b"\r\n\r\n")[2]
    families = {f.name: f for f in text_string_to_metric_families(page.decode())}
    assert families["vllm:num_requests_running"].type == "gauge"
    assert families["vllm:generation_tokens"].type == "counter"
    assert families["vllm:time_to_first_token_seconds"].type == "histogram"
    info = families["vllm:cache_config_info"].samples[0].labels
    assert (info["block_size"], info["num_gpu_blocks"]) == ("16", "30208")


def test_old_metric_names():
    page = talk(lambda t, _: t.send(get("/metrics")), old_names=True)
    assert b"vllm:gpu_cache_usage_perc{" in page
    assert b"kv_cache_usage_perc" not in page


def test_longest_request_fits_and_one_token_more_does_not():
    for config in (
        Replica(num_blocks=20), Replica(num_blocks=20, scheduler="sarathi", watermark=0.1),
        Replica(scheduler="vllm", max_batch_tokens=300, num_blocks=20),
        Replica(scheduler="orca", max_request_tokens=320, num_blocks=20),
    ):  # fmt: skip
        longest = max_model_len(config)
        assert 250 < longest <= 320
        prompt = [7] * (longest - 2)
        status, _ = ask("/v1/completions", {"prompt": prompt, "max_tokens": 2}, config=config)
        assert status == 200
        status, _ = ask("/v1/completions", {"prompt": prompt, "max_tokens": 3}, config=config)
        assert status == 400
