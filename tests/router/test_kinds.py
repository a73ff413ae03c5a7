"""Every inference endpoint, on emulated servers: ledger, admission, tokens, stickiness."""

from typing import Any

import orjson
import pytest

from router.conftest import post, reply, run, world
from router.emulated import emulated

TEXT = "some words to read " * 20
MESSAGES = [{"role": "user", "content": TEXT}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 8},
    "/v1/completions": {"prompt": TEXT, "max_tokens": 8},
    "/v1/responses": {"input": TEXT, "max_output_tokens": 8},
    "/v1/messages": {"system": "be kind", "messages": MESSAGES, "max_tokens": 8},
    "/v1/messages/count_tokens": {"messages": MESSAGES},
    "/v1/embeddings": {"input": [TEXT, TEXT]},
    "/v1/rerank": {"query": "which", "documents": [TEXT, "b"]},
    "/v2/rerank": {"query": "which", "documents": [TEXT, "b"]},
    "/rerank": {"query": "which", "documents": [TEXT, "b"]},
    "/v1/score": {"text_1": "one", "text_2": [TEXT, "b"]},
    "/score": {"text_1": "one", "text_2": [TEXT, "b"]},
    "/pooling": {"input": TEXT},
    "/classify": {"input": TEXT},
    "/tokenize": {"prompt": TEXT},
    "/detokenize": {"tokens": [1, 2]},
}
GENERATING = [path for path in BODIES if "max_" in "".join(BODIES[path])]


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY", "secret")


def test_every_endpoint_counts_in_ledger_and_admission() -> None:
    async def test() -> None:
        client = {"name": "a", "key_env": "KEY", "tokens_per_minute": 10**9}
        async with emulated(clients=[client], admission={"max_in_flight": 4}) as e:
            cluster = e.router.backends.cluster
            for sent, (path, body) in enumerate(BODIES.items()):
                assert cluster.replicas["sent_requests"][0] == sent
                answer = await e.ask(path, {"model": "emulated", **body}, "secret")
                assert answer.status == 200, (path, answer.body)
                answer = await e.ask(path, {"model": "other", **body}, "secret")
                assert answer.status == 404, path
                error = orjson.loads(answer.body)
                assert error["error"]["code"] == "model_not_found"
                assert error.get("type") == ("error" if "/messages" in path else None)
            await e.quiet()
            kinds = [kind for status, _, kind in e.counts.done if status == 200]
            assert len(kinds) == len(BODIES)
            assert "other" not in kinds

    run(test(), limit_s=100)


@pytest.mark.parametrize("path", GENERATING)
@pytest.mark.parametrize("streams", [True, False])
def test_tokens_of_every_form_are_counted(path: str, streams: bool) -> None:
    async def test() -> None:
        async with emulated() as e:
            body = {"model": "emulated", "ignore_eos": True, **BODIES[path], "stream": streams}
            if path in ("/v1/completions", "/v1/chat/completions") and streams:
                body["stream_options"] = {"include_usage": True}
            for _ in range(2):
                answer = await e.ask(path, body)
                assert answer.status == 200
                assert answer.complete
            await e.quiet()
            replica = e.router.backends.cluster.replicas[0]
            assert replica["finished"] == 2
            assert replica["finished_tokens"] == 16
            counter = e.router.backends.cluster.counter
            assert counter.learned["usage"] == 2
            assert counter.bytes_per_token("emulated") == pytest.approx(4, rel=0.3)

    run(test(), limit_s=100)


@pytest.mark.parametrize("streams", [True, False])
def test_a_conversation_of_responses_stays_with_its_replica(streams: bool) -> None:
    async def test() -> None:
        async with emulated(replicas=4) as e:
            previous: list[str | None] = [None] * 6
            for _ in range(3):
                for k, last in enumerate(previous):
                    body = {"model": "emulated", "input": f"turn of {k}", "stream": streams,
                            "max_output_tokens": 4}  # fmt: skip
                    if last is not None:
                        body["previous_response_id"] = last
                    answer = await e.ask("/v1/responses", body)
                    # Any other replica knows nothing of the previous response.
                    assert answer.status == 200, answer.body
                    start = answer.body.index(b'"id":"resp_') + 6
                    previous[k] = answer.body[start : answer.body.index(b'"', start)].decode()
            assert len({str(p)[:7] for p in previous}) == 4  # round robin used them all
            assert (await e.ask("/v1/responses", body | {"previous_response_id": "resp_x"})).status
            await e.quiet()

    run(test(), limit_s=100)


def test_a_conversation_whose_replica_is_gone_is_not_refused_by_the_router() -> None:
    async def test() -> None:
        async with emulated(replicas=2) as e:
            body = {"model": "emulated", "input": "a", "max_output_tokens": 4}
            answer = await e.ask("/v1/responses", body)
            home = int(answer.headers["x-tailrace-replica"] == e.emulators[0].urls[1][7:])
            e.router.backends.all[home].health.drain(True)
            body["previous_response_id"] = orjson.loads(answer.body)["id"]
            answer = await e.ask("/v1/responses", body)
            assert answer.status == 404
            assert b"not found" in answer.body  # in the words of the server
            e.router.backends.all[home].health.drain(False)
            assert (await e.ask("/v1/responses", body)).status == 200

    run(test(), limit_s=100)


def test_what_is_remembered_of_responses_is_bounded() -> None:
    async def test() -> None:
        async with emulated() as e:
            sessions = e.router.backends.cluster.sessions
            for k in range(200_000):
                sessions.remember_response("a", f"resp_{k}", 0)
            assert len(sessions) <= 100_000
            assert sessions.replica_of_response("a", "resp_199999") == 0
            assert sessions.replica_of_response("b", "resp_199999") == -1
            assert sessions.replica_of_response("a", "resp_1") == -1

    run(test(), limit_s=100)


def test_models_and_adapters_of_emulated_servers() -> None:
    async def test() -> None:
        async with emulated(("base", "lora-1", "lora-2"), ("other",), replicas=2) as e:
            for _ in range(4):
                for model in ("base", "other", "lora-1", "lora-2"):
                    body = {"model": model, "prompt": "a", "max_tokens": 2}
                    assert (await e.ask("/v1/completions", body)).status == 200
            body["model"] = "lora-3"
            answer = await e.ask("/v1/completions", body)
            assert answer.status == 404
            assert "base, lora-1, lora-2, other" in orjson.loads(answer.body)["error"]["message"]
            await e.quiet()

    run(test(), limit_s=100)


@pytest.mark.parametrize("keys", [("KEY", "OTHER"), ()])
def test_a_stored_response_is_asked_of_the_server_that_holds_it(
    keys: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTHER", "other")
    clients = [{"name": name.lower(), "key_env": name} for name in keys]

    def asked(line: str, key: str) -> bytes:
        return f"{line} HTTP/1.1\r\nHost: x\r\nX-Api-Key: {key}\r\n\r\n".encode()

    async def test() -> None:
        paths = ["/v1/responses", "/v1/responses/*"]
        async with world(3, paths=paths, clients=clients) as w:
            for number, backend in enumerate(w.backends):
                backend.default = reply(b'{"id":"resp_%d","object":"response"}' % number)
            header = "X-Api-Key: secret"
            made = await w.ask(post("/v1/responses", b'{"model":"m","input":"x"}', header))
            response_id = orjson.loads(made.body)["id"]
            holder = w.backends[int(response_id[-1])]
            for line in (
                f"GET /v1/responses/{response_id}",
                f"POST /v1/responses/{response_id}/cancel",
                f"GET /v1/responses/{response_id}/input_items",
                f"DELETE /v1/responses/{response_id}",
            ):
                for _ in range(3):
                    before = len(holder.seen)
                    assert (await w.ask(asked(line, "secret"))).status == 200
                    assert len(holder.seen) == before + 1
                    assert holder.seen[-1].line.startswith(line)
            # Another client's responses are not shown, wherever they are.
            seen = sum(len(backend.seen) for backend in w.backends)
            answer = await w.ask(asked(f"GET /v1/responses/{response_id}", "other"))
            if keys:
                assert answer.status == 404
                assert orjson.loads(answer.body)["error"]["code"] == "response_not_found"
                assert sum(len(backend.seen) for backend in w.backends) == seen
            # While its server is away there is no other that could answer.
            w.router.backends.all[w.backends.index(holder)].health.drain(True)
            assert (await w.ask(asked(f"GET /v1/responses/{response_id}", "secret"))).status == 503
            w.assert_quiet()

    run(test())
