"""``vllm bench serve`` without the ``vllm`` command: ``bench_serve.py OPTIONS``.

The command asks for the metadata of a package named vllm, which a repackaged vLLM does not have.
Runs with the Python that has vLLM.
"""

import argparse

from vllm.benchmarks.serve import add_cli_args, main

if __name__ == "__main__":
    parser = argparse.ArgumentParser("vllm bench serve")
    add_cli_args(parser)
    main(parser.parse_args())
