"""KV events are read in every form that servers publish."""

import json
from pathlib import Path

import msgpack
import pytest

from tailrace.net import kv_events
from tailrace.net.kv_events import AllCleared, BlocksRemoved, BlocksStored, EventBatch

DATA = Path(__file__).parents[1] / "data"
EVENTS = [
    BlocksStored([b"\1" * 32, b"\2" * 32], b"\0" * 32, list(range(8)), 4, None),
    BlocksStored([7], None, [1, 2, 3, 4], 4, [["salt"]]),
    BlocksRemoved([7, b"\1" * 32]),
    AllCleared(),
]


@pytest.mark.parametrize("as_maps", [False, True])
def test_what_is_written_is_read(as_maps: bool) -> None:
    batch = EventBatch(12.5, list(EVENTS), 3)
    assert kv_events.decode(kv_events.encode(batch, as_maps=as_maps)) == batch


def test_a_batch_may_be_an_array_of_maps() -> None:
    """As vLLM 0.32 writes it."""
    stored = {
        "type": "BlockStored", "block_hashes": [5], "parent_block_hash": None,
        "token_ids": [1, 2], "block_size": 2, "lora_id": None, "medium": "GPU",
        "lora_name": None, "extra_keys": [None], "group_idx": 0,
    }  # fmt: skip
    batch = kv_events.decode(msgpack.packb([1.0, [stored], 0]))
    assert batch.events == [BlocksStored([5], None, [1, 2], 2, [None])]


def test_what_a_real_server_has_published() -> None:
    """Recorded from vLLM 0.32 on a CPU."""
    recorded = json.loads((DATA / "kv_events_vllm.json").read_text())
    batches = [kv_events.decode(bytes.fromhex(payload)) for payload in recorded["payloads"]]
    events = [event for batch in batches for event in batch.events]
    kinds = {type(event) for event in events}
    assert kinds >= {BlocksStored, BlocksRemoved}
    stored = [event for event in events if isinstance(event, BlocksStored)]
    assert {event.block_size for event in stored} == {32}
    assert all(batch.at > 1.7e9 and batch.rank == 0 for batch in batches)


def test_older_servers_leave_out_the_last_fields() -> None:
    batch = kv_events.decode(msgpack.packb([1.0, [["BlockStored", [5], 4, [1, 2], 2, None]]]))
    assert batch == EventBatch(1.0, [BlocksStored([5], 4, [1, 2], 2)])
    with_adapter = ["BlockStored", [5], 4, [1, 2], 2, 1, "GPU", "poet"]
    batch = kv_events.decode(msgpack.packb([1.0, [with_adapter]]))
    assert batch.events == [BlocksStored([5], 4, [1, 2], 2, [["poet"]])]


@pytest.mark.parametrize(
    "event",
    [
        ["BlockStored", [5], 4, [1, 2], 2, None, "CPU"],  # a copy in slower memory
        ["BlockStored", [5], 4, [1, 2], 2, None, "GPU", None, None, 1],  # another kind of layer
        ["BlockStored", [5], 4, [1], 2, None],  # a part of a block
        ["BlockRemoved", [5], "STORAGE"],
        ["BlockPainted", "red"],  # of a newer server
    ],
)
def test_events_of_no_concern_are_left_out(event: list[object]) -> None:
    assert kv_events.decode(msgpack.packb([1.0, [event]])).events == []


@pytest.mark.parametrize(
    "payload",
    [
        b"", b"\xc1", b"hello", msgpack.packb(5), msgpack.packb([]), msgpack.packb({"ts": 1.0}),
        msgpack.packb([1.0, [["BlockStored", "no hashes", None, [], 4, None]]]),
        msgpack.packb([1.0, [["BlockStored", [1.5], None, [1], 1, None]]]),
        msgpack.packb([1.0, [["BlockStored", [1], 1.5, [1], 1, None]]]),
        msgpack.packb([1.0, [{"block_hashes": [1]}]]), msgpack.packb(["x", []]),
        msgpack.packb([1.0, [[]]]), msgpack.packb([1.0, [["BlockRemoved"]]]),
        msgpack.packb([1.0, [["BlockStored", [1], None, ["x"], 1, None]]]),
        msgpack.packb([1.0, [["BlockStored", [1], None, [2**64 - 1], 1, None]]]),
    ],
)  # fmt: skip
def test_garbage_is_refused(payload: bytes) -> None:
    with pytest.raises(ValueError, match="no batch of KV events"):
        kv_events.decode(payload)
