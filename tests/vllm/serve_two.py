"""Two real vLLM servers for examples/loop.py: ``python -m tests.vllm.serve_two FOLDER [BLOCKS]``.

Prints their addresses when they answer and stops them on Ctrl-C. The model is larger than that of
the tests, so that reading a prompt takes longer than everything around it. Each server keeps to a
core, and computes in one process: the usual two talk through memory that both watch all the time,
so that two servers on two cores take each other's time even when there is nothing to do.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

from .processes import PYTHON, vllm_environment, vllm_server

SCALE, LONGEST, BATCH, BLOCKS = 2, 4096, 16, 384


def main() -> None:
    folder = Path(sys.argv[1]).resolve()
    blocks = int(sys.argv[2]) if len(sys.argv) > 2 else BLOCKS
    model = folder / "model"
    maker = Path(__file__).with_name("tiny_model.py")
    subprocess.run(
        [str(PYTHON), str(maker), str(model), str(SCALE)], check=True, env=vllm_environment()
    )
    pair = [
        vllm_server(
            name, model, folder / f"{name}.log", longest=LONGEST, batch=BATCH, blocks=blocks
        )
        for name in ("left", "right")
    ]
    for number, server in enumerate(pair):
        core = number % (os.cpu_count() or 1)
        server.command = ["taskset", "--cpu-list", str(core), *server.command]
        # The API server has the engine in a process of its own in any case; this spares a third.
        server.environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        for server in pair:
            server.start()
        for server in pair:
            server.wait_until_healthy()
        print(" ".join(f"-b {server.url}" for server in pair), flush=True)
        signal.pause()
    except KeyboardInterrupt:
        pass
    finally:
        for server in pair:
            server.stop()


if __name__ == "__main__":
    main()
