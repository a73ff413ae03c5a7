"""Real vLLM behind the router: answers, prefix hits, metrics, standard clients."""

import json
import random
import re
import secrets
import shutil
import socket
import subprocess
import time
from pathlib import Path

import openai
import pytest

from .client import Reply, get, post, raw_exchange, raw_post
from .processes import BLOCK_TOKENS, BLOCKS, MODEL, vllm_environment, wait_for

pytestmark = pytest.mark.vllm

WORDS = ("gate", "keeper", "queue", "river", "boat", "wheel", "water", "token", "batch", "memory")


RUN = secrets.token_hex(4)


def story(name, words=60):
    """A text that no server has seen unless it was asked for by this name before."""
    pick = random.Random(name)
    return f"{RUN} {name}: " + " ".join(pick.choice(WORDS) for _ in range(words))


def completion(prompt, **more):
    return {
        "model": MODEL, "prompt": prompt, "max_tokens": 16, "temperature": 0, "ignore_eos": True,
        **more,
    }  # fmt: skip


def streamed(prompt, **more):
    return completion(prompt, stream=True, stream_options={"include_usage": True}, **more)


def metric(server, name, **labels):
    """Return a sample of a server's metrics, summed over the labels not given."""
    total = 0.0
    for line in get(server.address, "/metrics").body.decode().splitlines():
        if line.startswith(name + "{") and all(f'{k}="{v}"' in line for k, v in labels.items()):
            total += float(line.rpartition(" ")[2])
    return total


@pytest.fixture
def client(router):
    with openai.OpenAI(base_url=router.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


# ---- answers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
def test_body_goes_through_byte_for_byte(tap, start_router, stream):
    router = start_router({"tapped": f"http://127.0.0.1:{tap.address.port}"})
    body = (streamed if stream else completion)(story(f"bytes {stream}"))
    answer = raw_exchange(router.address, raw_post("/v1/completions", body))
    head, _, received = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    name = re.search(rb'"id":"(cmpl-[^"]+)"', received)[1]
    # The connection may have carried other answers before.
    _, _, sent = tap.answers_to(name).partition(name)
    before, _, after = received.partition(name)
    assert sent.startswith(after)
    whole = tap.answers_to(name)
    assert whole[: whole.index(name)].endswith(b"\r\n\r\n" + before)
    if stream:
        assert b"transfer-encoding: chunked" in head.lower()
        assert received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


@pytest.mark.parametrize("kind", ["completion", "chat"])
@pytest.mark.parametrize("stream", [True, False])
def test_answer_is_the_servers_own(servers, router, kind, stream):
    prompt = story(f"direct {kind} {stream}")
    body = (streamed if stream else completion)(prompt)
    path = "/v1/completions"
    if kind == "chat":
        del body["prompt"]
        body["messages"] = [{"role": "user", "content": prompt}]
        path = "/v1/chat/completions"
    through = post(router.address, path, body, {"x-request-id": "same"})
    server = next(s for s in servers if s.name == through.replica)
    direct = post(server.address, path, body, {"x-request-id": "same"})
    assert through.status == direct.status == 200
    # vLLM puts several tokens into one event when it cannot keep up, so events may differ.
    answers = []
    for reply in (through, direct):
        if stream:
            assert reply.is_whole
            first, usage, text = reply.chunks[0], reply.chunks[-1]["usage"], reply.text
        else:
            first, usage = reply.json(), reply.json()["usage"]
            choice = first["choices"][0]
            text = choice["text"] if kind == "completion" else choice["message"]["content"]
        answers.append((first["id"], list(first), text, usage["completion_tokens"]))
    assert answers[0] == answers[1]
    assert answers[0][0].endswith("-same")
    assert answers[0][3] == 16


def test_errors_of_the_server_go_through(servers, router):
    for body in (
        completion("text", model="unknown"),
        completion(story("too long", 4000)),
        completion("text", max_tokens=-1),
    ):
        through = post(router.address, "/v1/completions", body)
        direct = post(servers[0].address, "/v1/completions", body)
        assert 400 <= direct.status < 500
        assert (through.status, through.json()) == (direct.status, direct.json())
    assert all(r["state"] == "closed" for r in router.backends().values())


def test_other_paths_go_through(router):
    assert get(router.address, "/version").json()["version"].startswith("0.")
    tokens = post(router.address, "/tokenize", {"model": MODEL, "prompt": "a river"}).json()
    text = post(router.address, "/detokenize", {"model": MODEL, "tokens": tokens["tokens"]})
    assert text.json()["prompt"] == "a river"
    assert get(router.address, "/nothing").status == 404


def test_client_that_leaves_stops_the_server(servers, router):
    before = sum(metric(server, "vllm:generation_tokens_total") for server in servers)

    def leave(reply):
        if reply.body.count(b"data:") > 100:
            raise KeyboardInterrupt

    # Eight answers: on a busy machine the engine may be through with one before it hears of it.
    body = streamed(story("leaving"), max_tokens=1800, n=8, temperature=1)
    with pytest.raises(KeyboardInterrupt):
        post(router.address, "/v1/completions", body, on_data=leave)
    wait_for(
        lambda: not any(metric(server, "vllm:num_requests_running") for server in servers),
        60, "the servers to stop", every_s=0.05,
    )  # fmt: skip
    made = sum(metric(server, "vllm:generation_tokens_total") for server in servers) - before
    assert 0 < made < 8 * 1800
    assert all(b["ledger_in_flight"] == 0 for b in router.backends().values())


def test_client_that_closes_at_the_end_mark_has_got_everything(router):
    """The `openai` package closes its connection at [DONE], before the body has ended."""
    start = time.time()
    for k in range(8):
        request = raw_post("/v1/completions", streamed(story(f"closing {k}")))
        with socket.create_connection(router.address, 60) as connection:
            connection.sendall(request)
            received = b""
            while b"data: [DONE]" not in received:
                received += connection.recv(65536)
    lines = router.decided_since(start, 8)
    assert [line["outcome"] for line in lines] == ["done"] * 8
    assert [line["output_tokens"] for line in lines] == [16] * 8


# ---- what the router learns from the servers ----------------------------------------------------


def test_prefix_hits_are_seen(router):
    """The same long beginning goes where it is cached, and the index knows how much of it is."""
    start = time.time()
    texts = [story(f"prefix {k}", 250) for k in range(4)]
    first = [post(router.address, "/v1/completions", streamed(text)) for text in texts]
    again = [
        post(router.address, "/v1/completions", streamed(f"{text} And what came then?"))
        for text in texts
    ]
    assert all(reply.is_whole for reply in (*first, *again))
    assert [reply.replica for reply in again] == [reply.replica for reply in first]
    lines = router.decided_since(start, 8)
    for reply, line in zip((*first, *again), lines, strict=True):
        usage = reply.chunks[-1]["usage"]
        assert line["cached_reported"] == usage["prompt_tokens_details"]["cached_tokens"]
        assert (line["prompt_tokens"], line["prompt_known"]) == (usage["prompt_tokens"], "usage")
        assert line["output_tokens"] == usage["completion_tokens"] == 16
    for line in lines[:4]:
        assert line["cached_believed"] == line["cached_reported"] == 0
    for line in lines[4:]:
        assert line["cached_reported"] > 0.8 * line["prompt_tokens"]
        # The router counts in blocks of 256 bytes, the server in blocks of tokens.
        off = abs(line["cached_believed"] - line["cached_reported"])
        assert off <= 2 * BLOCK_TOKENS + 0.1 * line["prompt_tokens"]


def test_conversation_stays_where_its_beginning_is(router, client):
    start = time.time()
    messages = [{"role": "user", "content": story("conversation", 150)}]
    replicas, cached = [], []
    for _ in range(3):
        raw = client.chat.completions.with_raw_response.create(
            model=MODEL, messages=messages, max_tokens=40, temperature=0
        )
        answer = raw.parse()
        replicas.append(raw.headers["x-tailrace-replica"])
        cached.append(answer.usage.prompt_tokens_details.cached_tokens)
        messages.append({"role": "assistant", "content": answer.choices[0].message.content})
        messages.append({"role": "user", "content": "And then?"})
    assert len(set(replicas)) == 1
    assert cached[0] == 0
    assert 0 < cached[1] <= cached[2]
    lines = router.decided_since(start, 3)
    assert [line["turn"] for line in lines] == [0, 1, 2]
    assert all(line["cached_believed"] > 0 for line in lines[1:])


def test_metrics_of_the_servers_are_read(router):
    def read():
        return {replica["name"]: replica for replica in router.status()["replicas"]}

    for replica in read().values():
        assert replica["capacity_tokens"] == BLOCKS * BLOCK_TOKENS
        assert replica["metrics_age_s"] < 60

    seen = []

    def busy(reply):
        """Look while the answer streams: the router asks the servers all the time."""
        if 1 not in seen:
            seen.append(max(r["running"] for r in read().values()))

    body = streamed(story("metrics"), max_tokens=1500)
    assert post(router.address, "/v1/completions", body, on_data=busy).is_whole
    assert 1 in seen
    wait_for(lambda: not any(r["running"] for r in read().values()), 30, "idle servers")


# ---- standard clients ---------------------------------------------------------------------------


def test_openai_package(client):
    assert [model.id for model in client.models.list()] == [MODEL]
    prompt = story("openai")
    whole = client.completions.create(model=MODEL, prompt=prompt, max_tokens=16, temperature=0)
    assert whole.usage.completion_tokens == 16
    pieces = list(
        client.completions.create(
            model=MODEL, prompt=prompt, max_tokens=16, temperature=0, stream=True
        )
    )
    assert "".join(piece.choices[0].text for piece in pieces) == whole.choices[0].text
    messages = [{"role": "user", "content": prompt}]
    asked = {"model": MODEL, "messages": messages, "max_tokens": 16, "temperature": 0}
    pieces = list(client.chat.completions.create(**asked, stream=True))
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces)
    assert text == client.chat.completions.create(**asked).choices[0].message.content
    with pytest.raises(openai.NotFoundError, match="unknown"):
        client.completions.create(model="unknown", prompt=prompt)


def test_curl(router, tmp_path):
    curl = shutil.which("curl")
    if curl is None:
        pytest.skip("there is no curl")

    def run(body, *options):
        file = tmp_path / "body.json"
        file.write_text(json.dumps(body))
        command = [
            curl, "--silent", "--show-error", "--no-buffer", "--max-time", "60", *options,
            "-H", "content-type: application/json", "--data-binary", f"@{file}",
            f"{router.url}/v1/completions",
        ]  # fmt: skip
        return subprocess.run(command, check=True, capture_output=True, timeout=90).stdout

    prompt = story("curl")
    new = Reply(200, body=run(streamed(prompt)))
    # Old proxies speak HTTP/1.0, which has no chunks.
    old = Reply(200, body=run(streamed(prompt), "--http1.0"))
    for reply in (new, old):
        assert reply.is_whole
        assert reply.chunks[-1]["usage"]["completion_tokens"] == 16
    assert new.text == old.text
    # curl asks first before it sends a body of this size; the server finds it too long.
    large = json.loads(run(completion("river " * 300_000), "-H", "expect: 100-continue"))
    assert large["error"]["code"] == 400


def test_vllm_bench_serve(vllm_python, model, router, tmp_path):
    start = time.time()
    command = [
        vllm_python, str(Path(__file__).with_name("bench_serve.py")),
        "--backend", "openai", "--base-url", router.url, "--model", MODEL,
        "--tokenizer", str(model), "--dataset-name", "random", "--random-input-len", "64",
        "--random-output-len", "16", "--num-prompts", "24", "--request-rate", "8",
        "--save-result", "--result-dir", str(tmp_path), "--result-filename", "bench.json",
        "--disable-tqdm",
    ]  # fmt: skip
    ran = subprocess.run(
        command, cwd=tmp_path, env=vllm_environment(), capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    result = json.loads((tmp_path / "bench.json").read_text())
    assert (result["completed"], result["failed"]) == (24, 0)
    assert result["total_output_tokens"] == 24 * 16
    lines = router.decided_since(start, 24)
    assert {line["outcome"] for line in lines} == {"done"}
    assert {line["replica"] for line in lines} == {0, 1}
