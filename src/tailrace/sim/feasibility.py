"""Checks before a run: settings a scheduler cannot work with, requests that could never finish."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tailrace.config import Event, Replica
from tailrace.errors import TailraceError
from tailrace.workload.table import RequestTable


def check_cluster(replicas: Sequence[Replica], events: Sequence[Event] = ()) -> None:
    """Raise if a scheduler cannot work with its settings, or an event names no replica."""
    for number, replica in enumerate(replicas):
        problem = _setting_problem(replica)
        if problem:
            raise TailraceError(f"replica {number}: {problem}")
    for event in events:
        if event.replica >= len(replicas):
            raise TailraceError(
                f"an event names replica {event.replica}, but the cluster has {len(replicas)}, "
                "counted from 0"
            )


def _setting_problem(replica: Replica) -> str:
    name = replica.scheduler
    if name in ("vllm_v1", "lightllm") and replica.num_stages > 1:
        return f"{name} runs on one pipeline stage, got num_stages = {replica.num_stages}"
    if name == "lightllm" and replica.block_size != 1:
        return f"lightllm counts single tokens: set block_size = 1, got {replica.block_size}"
    if name in ("sarathi", "vllm") and replica.batch_cap < replica.num_stages:
        return f"batch_cap = {replica.batch_cap} is less than num_stages = {replica.num_stages}"
    if name in ("orca", "faster_transformer") and replica.max_request_tokens < replica.block_size:
        return (
            f"max_request_tokens = {replica.max_request_tokens} is less than "
            f"block_size = {replica.block_size}"
        )
    return ""


def check_requests(replicas: Sequence[Replica], table: RequestTable) -> None:
    """Raise for the first request that some replica might never finish.

    A request must be able to run alone, and to resume alone after a preemption at any point.
    ``replicas`` have their ``num_blocks`` set.
    """
    prompt = table.rows["prompt_tokens"].astype(np.int64)
    output = table.rows["output_tokens"].astype(np.int64)
    seen: set[Replica] = set()
    for number, replica in enumerate(replicas):
        if replica in seen:
            continue
        seen.add(replica)
        assert replica.num_blocks is not None
        needs = [
            (_blocks_needed(replica, prompt, output), replica.num_blocks, "KV blocks", "num_blocks")
        ]
        if replica.scheduler in ("vllm", "lightllm"):
            # After a preemption vllm prefills the prompt and the output so far in one piece.
            longest = prompt + output - 1 if replica.scheduler == "vllm" else prompt
            limit = replica.max_batch_tokens
            needs.append((longest, limit, "tokens in one batch", "max_batch_tokens"))
        if replica.scheduler in ("orca", "faster_transformer"):
            limit = replica.max_request_tokens
            needs.append((prompt + output, limit, "tokens", "max_request_tokens"))
        for need, available, what, setting in needs:
            if (need > available).any():
                row = int(np.argmax(need > available))
                raise TailraceError(
                    f"request {row} may need {need[row]} {what}, but replica {number} has only "
                    f"{available}: raise {setting} or leave the request out"
                )


def _blocks_needed(
    replica: Replica, prompt: NDArray[np.int64], output: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the KV blocks [R] each request needs to finish however often it is preempted."""
    size = replica.block_size
    decodes = output > 1
    if replica.scheduler == "vllm_v1":
        # Blocks are allocated one token ahead of the tokens computed.
        return -(-(prompt + output * decodes) // size)
    if replica.scheduler == "lightllm":
        # Its look-ahead wants one token more than it will use.
        return prompt + np.where(decodes, output, 2)
    if replica.scheduler in ("orca", "faster_transformer"):
        return np.full_like(prompt, replica.max_request_tokens // size)
    assert replica.num_blocks is not None
    watermark = int(replica.watermark * replica.num_blocks)
    # A decode wants a free block before it runs, even if it does not need one.
    spare = np.maximum(watermark, decodes.astype(np.int64))
    return -(-(prompt + output - 1) // size) + spare
