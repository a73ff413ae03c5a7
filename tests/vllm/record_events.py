"""Record what a real vLLM does with a few prompts: ``python -m tests.vllm.record_events FILE``.

Each step of the recording is a request, the server's answer to ``/tokenize`` for it, the cached
tokens that it reported, and the payloads of the KV events that it published meanwhile. The
server's cache is too small for all prompts; every third request is another client's.
"""

import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import zmq

from tailrace.emulate.tokenizer import WORDS

from .client import post
from .processes import MODEL, PYTHON, free_port, vllm_environment, vllm_server

#: KV blocks of the server, and tokens of its longest request.
BLOCKS, LONGEST = 34, 1024
#: How long events are waited for after an answer, ms.
QUIET_MS = 400


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = folder / "model"
        maker = Path(__file__).with_name("tiny_model.py")
        subprocess.run([str(PYTHON), str(maker), str(model)], check=True, env=vllm_environment())
        log = folder / "events.log"
        server = vllm_server("events", model, log, blocks=BLOCKS, longest=LONGEST)
        config = {
            "enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"ipc://{folder}/e",
            "replay_endpoint": f"tcp://127.0.0.1:{free_port()}",
        }  # fmt: skip
        server.command += ["--kv-events-config", json.dumps(config)]
        server.environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        try:
            server.start()
            server.wait_until_healthy()
            events = zmq.Context.instance().socket(zmq.SUB)
            events.setsockopt(zmq.SUBSCRIBE, b"")
            events.connect(str(config["endpoint"]))
            time.sleep(1.0)
            recorded = {"server": "vllm 0.32.0", "blocks": BLOCKS, "steps": steps(server, events)}
        finally:
            server.stop()
    Path(sys.argv[1]).write_text(json.dumps(recorded, separators=(",", ":")) + "\n")


def steps(server: Any, events: Any) -> list[dict[str, Any]]:
    rng, found = random.Random(5), []
    talks: list[list[dict[str, str]]] = [[], [], []]
    for k in range(18):
        talk = talks[k % 3]
        if len(talk) > 6:
            talk.clear()
        text = " ".join(rng.choices(WORDS, k=40 if talk else 60))
        talk.append({"role": "user", "content": text})
        asked = {"model": MODEL, "messages": list(talk), "max_tokens": 4}
        answer = post(server.address, "/v1/chat/completions", asked).json()
        question = {"model": MODEL, "messages": asked["messages"], "return_token_strs": True}
        tokens = post(server.address, "/tokenize", question).json()
        talk.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
        payloads = []
        while events.poll(QUIET_MS):
            _, number, payload = events.recv_multipart()
            assert int.from_bytes(number, "big") == sum(len(s["payloads"]) for s in found) + len(
                payloads
            )
            payloads.append(payload.hex())
        usage = answer["usage"]
        details = usage.get("prompt_tokens_details") or {}
        found.append(
            {"own": k % 3 != 2, "request": asked, "tokenize": tokens, "usage": usage,
             "cached": details.get("cached_tokens") or 0, "payloads": payloads}
        )  # fmt: skip
    return found


if __name__ == "__main__":
    main()
