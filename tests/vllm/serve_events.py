"""A real vLLM server with KV events: ``python -m tests.vllm.serve_events FOLDER [BLOCKS]``.

Prints the options for benchmarks/kv_events.py when it answers, and stops it on Ctrl-C.
"""

import json
import signal
import subprocess
import sys
from pathlib import Path

from .processes import BLOCKS, PYTHON, free_port, vllm_environment, vllm_server


def main() -> None:
    folder = Path(sys.argv[1]).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    blocks = int(sys.argv[2]) if len(sys.argv) > 2 else BLOCKS
    model = folder / "model"
    maker = Path(__file__).with_name("tiny_model.py")
    if not model.exists():
        subprocess.run([str(PYTHON), str(maker), str(model)], check=True, env=vllm_environment())
    server = vllm_server("events", model, folder / "events.log", blocks=blocks)
    replay = f"tcp://127.0.0.1:{free_port()}"
    config = {
        # Only an address with * in it is bound to; this one stays on the loopback device.
        "enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"ipc://{folder}/events",
        "replay_endpoint": replay,
    }  # fmt: skip
    endpoint = str(config["endpoint"])
    server.command += ["--kv-events-config", json.dumps(config)]
    server.environment["VLLM_SERVER_DEV_MODE"] = "1"  # for /reset_prefix_cache
    server.environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        server.start()
        server.wait_until_healthy()
        print(f"-b {server.url} --kv-events {endpoint} --kv-replay {replay}", flush=True)
        signal.pause()
    except KeyboardInterrupt:
        pass
    finally:
        server.stop()


if __name__ == "__main__":
    main()
