"""Requests go where their model is; what models there are."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson
import pytest

from router.conftest import Answer, Backend, Clock, Counts, World, post, reply, run, settings_for
from router.test_access import client, error_of
from tailrace.router.app import Router

MODELS = {"path": "/v1/models", "interval_s": 1000}


def listed(*names: str, **more: Any) -> bytes:
    return orjson.dumps({"object": "list", "data": [{"id": name, **more} for name in names]})


class ModelBackend(Backend):
    """Lists its models, and knows no others."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.models = listed(*names)
        self.status = "200 OK"
        self.default = self.chat

    async def chat(self, seen: Any, reader: Any, writer: Any) -> None:
        if seen.line.startswith("GET"):
            self.seen.remove(seen)
            await reply(self.models, self.status)(seen, reader, writer)
            return
        model = orjson.loads(seen.body).get("model")
        listed = orjson.loads(self.models).get("data")
        known = listed is None or model in {None, *(entry["id"] for entry in listed)}
        status = "200 OK" if known else "404 Not Found"
        await reply(b'{"usage":{}}', status)(seen, reader, writer)


class Served:
    """A router in front of backends with models."""

    def __init__(
        self, *backends: ModelBackend, stated: Sequence[list[str]] = (), **over: Any
    ) -> None:
        """``stated``: models of each backend in the settings."""
        self.backends = list(backends)
        self.stated = stated
        self.over: dict[str, Any] = {"models": MODELS, **over}

    async def __aenter__(self) -> World:
        for backend in self.backends:
            await backend.start()
        counts, clock = Counts(), Clock()
        if self.stated:
            pairs = zip(self.backends, self.stated, strict=True)
            self.over["backends"] = [{"url": b.url, "models": names} for b, names in pairs]
        settings = settings_for(list(self.backends), **self.over)
        self.router = Router(settings, events=counts, clock=clock)
        await self.router.start()
        self.world = World(self.router, list(self.backends), counts, clock)
        return self.world

    async def __aexit__(self, *_: object) -> None:
        for one in self.world.opened:
            one.writer.close()
        await self.router.stop()
        for backend in self.backends:
            await backend.kill()


def chat(model: str | None, key: str = "", path: str = "/v1/chat/completions") -> bytes:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]}
    if model is not None:
        body["model"] = model
    return post(path, orjson.dumps(body), *([f"x-api-key: {key}"] if key else []))


async def models(w: World, path: str = "/v1/models", key: str = "") -> Answer:
    lines = f"x-api-key: {key}\r\n" if key else ""
    return await w.ask(f"GET {path} HTTP/1.1\r\nHost: x\r\n{lines}\r\n".encode())


def names(answer: Answer) -> list[str]:
    return [entry["id"] for entry in orjson.loads(answer.body)["data"]]


@pytest.fixture(autouse=True)
def _keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "ab":
        monkeypatch.setenv(f"KEY_{name.upper()}", f"secret-{name}")


def test_two_models_on_two_backends_asked_in_turns() -> None:
    async def test() -> None:
        one, other = ModelBackend("one", "adapter"), ModelBackend("other")
        async with Served(one, other) as w:
            for _ in range(10):
                for model in ("one", "other", "adapter"):
                    assert (await w.ask(chat(model))).status == 200, model
            assert (len(one.seen), len(other.seen)) == (20, 10)
            assert (await w.ask(chat(None))).status == 200
            assert sorted(names(await models(w))) == ["adapter", "one", "other"]
            w.assert_quiet()

    run(test())


def test_an_unknown_model_gets_the_known_names() -> None:
    async def test() -> None:
        async with Served(ModelBackend("one"), ModelBackend("other")) as w:
            for path in ("/v1/chat/completions", "/v1/embeddings", "/tokenize"):
                answer = await w.ask(chat("three", path=path))
                assert answer.status == 404
                error = error_of(answer)
                assert (error["code"], error["param"]) == ("model_not_found", "model")
                assert "one, other" in error["message"]
            answer = await w.ask(chat("x" * 100_000))
            assert answer.status == 404
            assert len(answer.body) < 1000
            assert not [s for b in w.backends for s in b.seen]
            w.assert_quiet()

    run(test())


def test_models_by_settings_are_not_asked() -> None:
    async def test() -> None:
        one, other = ModelBackend(), ModelBackend()
        one.models, other.models = listed("not", "this"), listed("nor", "that")
        one.default = other.default = reply(b"{}")
        served = Served(one, other, stated=(["a", "b"], ["b", "c"]))
        async with served as w:
            for model in "abcbabc":
                assert (await w.ask(chat(model))).status == 200
            assert {orjson.loads(s.body)["model"] for s in one.seen} <= {"a", "b"}
            assert {orjson.loads(s.body)["model"] for s in other.seen} <= {"b", "c"}
            assert sorted(names(await models(w))) == ["a", "b", "c"]
            assert (await w.ask(chat("this"))).status == 404

    run(test())


def test_aliases() -> None:
    async def test() -> None:
        aliases = {"gpt": "one", "gone": "nowhere"}
        one, other = ModelBackend("one"), ModelBackend("other")
        async with Served(one, other, models={**MODELS, "aliases": aliases}) as w:
            for body in (
                b'{"model":"gpt","messages":[]}',
                b'{ "x" : {"model":"gpt"}, "prompt" : "\\"model\\": \\"gpt\\"", "model" : "gpt" }',
                b'{"model":"gpt","prompt":"\xc3\xa9","user":"u"}',
            ):
                assert (await w.ask(post("/v1/completions", body))).status == 200
                seen = one.seen.pop()
                assert orjson.loads(seen.body)["model"] == "one"
                assert len(seen.body) == len(body)  # "one" for "gpt" and nothing else
            for odd in (
                b'{"model":"gpt","model":"gpt"}',
                b'{"model":"other","mod\\u0065l":"gpt"}',
            ):
                answer = await w.ask(post("/v1/completions", odd))
                assert (answer.status, error_of(answer)["param"]) == (400, "model")
            assert (await w.ask(chat("gone"))).status == 404
            answer = await models(w)
            assert sorted(names(answer)) == ["gpt", "one", "other"]
            entry = orjson.loads((await models(w, "/v1/models/gpt")).body)
            assert (entry["id"], entry["root"]) == ("gpt", "one")
            w.assert_quiet()

    run(test())


def test_one_model_by_its_name() -> None:
    async def test() -> None:
        async with Served(ModelBackend("org/name", "a b")) as w:
            for path in ("/v1/models/org/name", "/v1/models/org%2Fname", "/v1/models/a%20b"):
                answer = await models(w, path)
                assert answer.status == 200, path
                assert orjson.loads(answer.body)["id"] in ("org/name", "a b")
            for path in ("/v1/models/", "/v1/models/x", "/v1/models/../metrics"):
                assert (await models(w, path)).status in (400, 404)
            assert not w.backends[0].seen

    run(test())


def test_a_client_sees_and_uses_its_own_models_only() -> None:
    async def test() -> None:
        clients = [client("a", models=["one", "gpt"]), client("b")]
        one, other = ModelBackend("one"), ModelBackend("other")
        over = {"clients": clients, "models": {**MODELS, "aliases": {"gpt": "other"}}}
        async with Served(one, other, **over) as w:
            assert sorted(names(await models(w, key="secret-a"))) == ["gpt", "one"]
            assert sorted(names(await models(w, key="secret-b"))) == ["gpt", "one", "other"]
            assert (await models(w, "/v1/models/other", key="secret-a")).status == 404
            assert (await w.ask(chat("one", "secret-a"))).status == 200
            assert (await w.ask(chat("gpt", "secret-a"))).status == 200
            assert (await w.ask(chat("other", "secret-b"))).status == 200
            for model in ("other", "nowhere"):
                answer = await w.ask(chat(model, "secret-a"))
                assert (answer.status, error_of(answer)["param"]) == (403, "model")
                assert "other" not in error_of(answer)["message"].replace(f"'{model}'", "")
            assert (await w.ask(chat("nowhere", "secret-b"))).status == 404
            answer = await w.ask(chat(None, "secret-a"))
            assert (answer.status, error_of(answer)["param"]) == (400, "model")
            before = len(one.seen) + len(other.seen)
            for body in (
                b'{"model":"other","model":"one"}', b'{"model":"one","model":"other"}',
                b'{"mod\\u0065l":"other","model":"one"}', b'{"model":"one","mod\\u0065l":"other"}',
            ):  # fmt: skip
                answer = await w.ask(post("/v1/completions", body, "x-api-key: secret-a"))
                assert answer.status in (400, 403)
            assert len(one.seen) + len(other.seen) == before
            w.assert_quiet()
            assert all(c.account.active == 0 for c in w.router.keyring.clients)

    run(test())


def test_a_path_that_is_not_read_cannot_name_a_forbidden_model() -> None:
    async def test() -> None:
        clients = [client("a", models=["one"]), client("b")]
        async with Served(ModelBackend("one"), clients=clients, paths=["/odd"]) as w:
            for body, status in (
                (b'{"model":"one"}', 200), (b'{"model":"two"}', 403), (b"model=two", 403),
                (b'{"model":"two","model":"one"}', 400), (b"", 403),
            ):  # fmt: skip
                answer = await w.ask(post("/odd", body, "x-api-key: secret-a"))
                assert answer.status == status, body
            assert (await w.ask(post("/odd", b"{}", "x-api-key: secret-b"))).status == 200

    run(test())


def test_a_server_that_lists_nothing_may_get_any_model() -> None:
    async def test() -> None:
        one, mute = ModelBackend("one"), ModelBackend()
        mute.status = "401 Unauthorized"
        async with Served(one, mute) as w:
            mute.default = reply(b"{}")
            assert (await w.ask(chat("anything"))).status == 200
            assert [orjson.loads(s.body)["model"] for s in mute.seen] == ["anything"]
            for _ in range(4):
                assert (await w.ask(chat("one"))).status == 200
            assert one.seen
            assert len(mute.seen) > 1

    run(test())


def test_adapters_in_the_metrics_of_a_server_are_found() -> None:
    async def test() -> None:
        one, other = ModelBackend("one"), ModelBackend("one")
        metrics = {"path": "/metrics", "interval_s": 1000}
        async with Served(one, other, metrics=metrics) as w:
            assert (await w.ask(chat("sql"))).status == 404
            other.metrics = (
                b'vllm:lora_requests_info{running_lora_adapters="sql",waiting_lora_adapters=""} 1\n'
            )
            other.default = reply(b"{}")
            await w.router.scraper.scrape()
            for _ in range(3):
                assert (await w.ask(chat("sql"))).status == 200
            assert [len(b.seen) for b in (one, other)] == [0, 3]
            assert names(await models(w)) == ["one", "sql"]
            # It has no requests just now, but is still loaded.
            other.metrics = b'vllm:lora_requests_info{running_lora_adapters=""} 2\n'
            await w.router.scraper.scrape()
            assert (await w.ask(chat("sql"))).status == 200
            for number in range(3000):
                w.router.models.loaded(w.router.backends.all[0], frozenset({f"a{number}"}))
            assert len(w.router.models.names()) <= 1026
            w.assert_quiet()

    run(test())


def test_new_models_are_found_and_those_of_a_dead_server_are_missed() -> None:
    async def test() -> None:
        one, other = ModelBackend("one"), ModelBackend("other")
        async with Served(one, other) as w:
            assert (await w.ask(chat("lora"))).status == 404
            other.models = listed("other", "lora")
            await w.router.models.ask()
            assert (await w.ask(chat("lora"))).status == 200
            other.models = b"{}"  # rubbish is no list
            await w.router.models.ask()
            assert (await w.ask(chat("lora"))).status == 200
            other.models = listed("other")
            await w.router.models.ask()
            assert (await w.ask(chat("lora"))).status == 404
            w.router.backends.all[1].health.drain(True)
            answer = await w.ask(chat("other"))
            assert (answer.status, answer.headers["retry-after"] != "") == (503, True)
            assert names(await models(w)) == ["one"]
            assert (await w.ask(chat("one"))).status == 200
            w.assert_quiet()

    run(test())


def test_a_server_that_has_not_answered_yet_gets_no_named_model() -> None:
    async def test() -> None:
        one, late = ModelBackend("one"), ModelBackend("late")
        late.status = "503 Starting"
        async with Served(one, late) as w:
            for _ in range(4):
                assert (await w.ask(chat("one"))).status == 200
            assert not late.seen
            assert (await w.ask(chat("late"))).status == 503
            late.status = "200 OK"
            await w.router.models.ask()
            assert (await w.ask(chat("late"))).status == 200

    run(test())


def test_a_full_model_does_not_hold_up_another() -> None:
    async def test() -> None:
        go = asyncio.Event()

        async def slow(seen: Any, reader: Any, writer: Any) -> None:
            await go.wait()
            await reply(b"{}")(seen, reader, writer)

        one, other = ModelBackend("one"), ModelBackend("other")
        async with Served(one, other, admission={"max_in_flight": 1}) as w:
            one.scripts = [slow]
            held = [await w.client() for _ in range(3)]
            for each in held:
                each.send(chat("one"))
            await one.arrived.wait()
            while len(w.router.dispatcher.queue) < 2:
                await asyncio.sleep(0)
            for _ in range(3):
                assert (await w.ask(chat("other"))).status == 200
            assert len(w.router.dispatcher.queue) == 2
            go.set()
            for each in held:
                assert (await each.answer()).status == 200
            w.assert_quiet()

    run(test())


@pytest.mark.parametrize("policy", ["tailrace", "load_aware", "round_robin", "cache_aware"])
def test_a_policy_chooses_among_the_eligible_only(policy: str) -> None:
    async def test() -> None:
        backends = [ModelBackend("a"), ModelBackend("b"), ModelBackend("a"), ModelBackend("a", "b")]
        routing = {"policy": policy, "limit_ms": 10_000}
        async with Served(*backends, routing=routing) as w:
            for k in range(12):
                assert (await w.ask(chat("ab"[k % 2]))).status == 200
            w.assert_quiet()
            assert w.router.backends.cluster.replicas["available"].tolist() == [1] * 4

    run(test(), limit_s=100)  # it may have to compile


def test_reload_changes_models_and_aliases(tmp_path: Path) -> None:
    async def test() -> None:
        one, other = ModelBackend("one"), ModelBackend("other")
        async with Served(one, other) as w:
            old = w.router.settings
            changed = old.model_dump() | {
                "backends": [b.model_dump() for b in old.backends[:1]],
                "models": {**MODELS, "aliases": {"x": "one"}},
            }
            w.router._load = lambda: type(old).model_validate(changed)
            w.router.reload()
            assert (await w.ask(chat("other"))).status == 404
            assert (await w.ask(chat("x"))).status == 200
            w.router._load = lambda: old
            w.router.reload()
            await w.router.models.ask()
            assert (await w.ask(chat("other"))).status == 200
            assert (await w.ask(chat("x"))).status == 404

    run(test())


@pytest.mark.parametrize("adapter", [False, True])
@pytest.mark.parametrize("late", [False, True])
def test_no_client_takes_out_all_servers_of_a_model(adapter: bool, late: bool) -> None:
    """Half of all four would be both servers of one model. An adapter counts with its model."""

    async def test() -> None:
        backends = [ModelBackend("one"), ModelBackend("one"), ModelBackend("two"),
                    ModelBackend("two")]  # fmt: skip
        if adapter:
            backends[0].models = listed("one", "adapter")
        async with Served(*backends, retry={"attempts": 1}) as w:
            router = w.router.backends
            for backend in router.all[:2]:
                for _ in range(100):
                    if late:
                        router.suspect(backend, w.clock(), "late")
                    else:
                        router.failed(backend, w.clock(), "closed the connection")
            assert [b.health.state for b in router.all] == ["open", *["closed"] * 3]
            assert (await w.ask(chat("one"))).status == 200
            for backend in router.all[2:]:
                for _ in range(100):
                    router.failed(backend, w.clock(), "closed the connection")
            assert [b.health.state for b in router.all] == ["open", "closed"] * 2
            assert (await w.ask(chat("two"))).status == 200

    run(test())


def test_a_response_is_continued_with_another_model_where_that_is() -> None:
    async def test() -> None:
        one, other = ModelBackend("one"), ModelBackend("other")
        async with Served(one, other) as w:
            w.router.backends.cluster.sessions.remember_response("", "resp_1", 0)
            for model, backend in (("one", one), ("other", other)):
                body = {"model": model, "input": "x", "previous_response_id": "resp_1"}
                answer = await w.ask(post("/v1/responses", orjson.dumps(body)))
                assert answer.status == 200
                assert len(backend.seen) == 1

    run(test())
