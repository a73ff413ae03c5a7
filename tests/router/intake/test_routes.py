"""Which paths lead to a server, and to what kind of request."""

import pytest

from tailrace.router.intake.routes import INFERENCE_PATHS, RouteTable, kind_of


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/v1/chat/completions?x=1", "chat"),
        ("/base/v1/completions/", "completion"),
        ("/v1/embeddings", "embedding"),
        ("/v1/responses", "response"),
        ("/v1/messages", "message"),
        ("/v1/messages/count_tokens", "count_tokens"),
        ("/base/rerank", "rerank"),
        ("/v1/models", "other"),
        ("/v1/responses/abc", "other"),
        ("/notcompletions", "other"),
        ("", "other"),
    ],
)
def test_kinds(path: str, kind: str) -> None:
    assert kind_of(path) == kind


#: What a client must not reach on a server, however it is written.
OUT_OF_REACH = (
    *("/metrics", "/sleep", "/wake_up", "/pause", "/collective_rpc", "/update_weights"),
    *("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/shutdown", "/reset_prefix_cache"),
    *("/server_info", "/docs", "/openapi.json", "/", "", "*", "/v1", "/v1/"),
    *("//metrics", "/v1/..//metrics", "//v1/..//metrics", "/v1/../metrics", "/./metrics"),
    *("/v1/chat/completions/../../../metrics", "/v1/chat/completions/..;/metrics"),
    *("/%6detrics", "/v1/%2e%2e/metrics", "/v1%2f..%2fmetrics", "/v1/chat%2fcompletions"),
    *("/v1/chat/completions/", "/V1/chat/completions", "/v1/Chat/completions"),
    *("//v1/chat/completions", "/v1//chat/completions", "/v1/chat/completions;a=b"),
    *("/v1/chat/completions#/../metrics", "/v1/chat/completions%00", "\\metrics", "/v1\\..\\x"),
    *("/v1/chat/completions\t", "/metrics%3f/v1/chat/completions", "/x/v1/chat/completions"),
)


@pytest.mark.parametrize("path", OUT_OF_REACH)
def test_only_listed_paths_lead_to_a_server(path: str) -> None:
    assert RouteTable().find(path.encode()) is None


def test_all_inference_paths_are_served_by_default() -> None:
    table = RouteTable()
    for path in INFERENCE_PATHS:
        route = table.find(path.encode())
        assert route is not None
        assert route.kind != "other"
        assert route.needs_key


def test_a_list_of_paths_takes_the_place_of_the_default() -> None:
    table = RouteTable(("/v1/embeddings", "/proxy/v1/chat/completions", "/files/*"))
    kinds = {
        path: route.kind
        for path in ("/v1/embeddings", "/proxy/v1/chat/completions", "/files/a", "/files/a/b.txt")
        if (route := table.find(path.encode())) is not None
    }
    assert list(kinds.values()) == ["embedding", "chat", "other", "other"]
    for path in ("/v1/chat/completions", "/files", "/files/", "/files/../x", "/files/a//b",
                 "/files/%2e%2e/x", "/files/a/", "/files/.", "/files/a;b"):  # fmt: skip
        assert table.find(path.encode()) is None, path


def test_a_pattern_keeps_the_kinds_of_what_is_known() -> None:
    table = RouteTable(("/*",))
    found = table.find(b"/v1/chat/completions")
    assert found is not None
    assert found.kind == "chat"
    assert table.find(b"/metrics") is not None
    assert table.find(b"//metrics") is None


def test_the_routers_own_endpoints_are_always_there() -> None:
    table = RouteTable(())
    for path, needs_key in ((b"/health", False), (b"/v1/models", True), (b"/v1/models/a/b", True)):
        route = table.find(path)
        assert route is not None
        assert route.needs_key == needs_key
