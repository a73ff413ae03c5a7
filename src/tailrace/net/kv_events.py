"""KV-cache events as vLLM publishes them: what a server stores in its prefix cache and evicts.

A message has three parts: topic, sequence number (8 bytes, big-endian), and a msgpack payload. The
payload is a batch of events, either as arrays, ``[time, events, data-parallel rank]`` with events
``["BlockStored", hashes, parent, token ids, block size, ...]``, or, from newer servers, as maps
with the names of the fields and the event's name under ``type``. Block hashes are bytes or numbers.
A request for replay is a sequence number; the response is every later message that the server still
has, and at the end the number -1.
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

BlockHash = int | bytes

SEQUENCE_BYTES = 8
#: Sequence number of the message that ends a replay.
END = (-1).to_bytes(SEQUENCE_BYTES, "big", signed=True)
#: Blocks are stored in the memory of the accelerator unless an event says something else.
MAIN_MEMORY = "GPU"

_STORED_FIELDS = (
    "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium",
    "lora_name", "extra_keys", "group_idx",
)  # fmt: skip
_REMOVED_FIELDS = ("block_hashes", "medium", "group_idx")
_FIELDS = {
    "BlockStored": _STORED_FIELDS, "BlockRemoved": _REMOVED_FIELDS, "AllBlocksCleared": (),
}  # fmt: skip


@dataclass(slots=True)
class BlocksStored:
    """Consecutive blocks of one prompt that are cached from now on."""

    hashes: Sequence[BlockHash]
    parent: BlockHash | None
    """The block before the first; None: the prompt begins here."""
    token_ids: Sequence[int]
    """Of all the blocks together."""
    block_size: int
    """Tokens per block."""
    extra_keys: Sequence[Any] | None = None
    """What else distinguishes each block: LoRA adapter, cache salt, images; None: nothing."""


@dataclass(slots=True)
class BlocksRemoved:
    """Blocks that are no longer cached."""

    hashes: Sequence[BlockHash]


@dataclass(slots=True)
class AllCleared:
    """The whole cache is empty."""


Event = BlocksStored | BlocksRemoved | AllCleared


@dataclass(slots=True)
class EventBatch:
    """Events of one moment."""

    at: float
    """Unix time of the server, s."""
    events: list[Event]
    rank: int | None = None
    """Data-parallel rank of the server."""


def decode(payload: bytes) -> EventBatch:
    """Read a payload in either form; raise ValueError if it is none."""
    import msgpack  # of the extra "cluster"

    try:
        data = msgpack.unpackb(payload, raw=False, strict_map_key=False)
        if isinstance(data, Mapping):
            at, events, rank = data["ts"], data["events"], data.get("data_parallel_rank")
        else:
            at, events, *more = data
            rank = more[0] if more else None
        found = [event for given in events if (event := _event(given)) is not None]
        return EventBatch(float(at), found, rank)
    except (LookupError, TypeError, ValueError, OverflowError, msgpack.UnpackException) as error:
        raise ValueError(f"no batch of KV events: {error!r}"[:200]) from None


def encode(batch: EventBatch, *, as_maps: bool = False) -> bytes:
    """Write a payload: as arrays, or with ``as_maps`` as newer servers do."""
    import msgpack

    events: list[Any] = []
    for event in batch.events:
        kind, values = _values(event)
        fields = _FIELDS[kind]
        if as_maps:
            events.append({"type": kind, **dict(zip(fields, values, strict=False))})
        else:
            events.append([kind, *values])
    if as_maps:
        about = {"ts": batch.at, "events": events, "data_parallel_rank": batch.rank}
        return bytes(msgpack.packb(about))
    return bytes(msgpack.packb([batch.at, events, batch.rank]))


def _event(given: Any) -> Event | None:
    """Read one event; None: it is of no concern here."""
    if isinstance(given, Mapping):
        kind, fields = given["type"], given
    else:
        kind, *values = given
        fields = dict(zip(_FIELDS.get(kind, ()), values, strict=False))
    if kind == "AllBlocksCleared":
        return AllCleared()
    if kind not in _FIELDS:
        return None  # of a newer server
    # Copies in slower memory, and caches of other layers than those with full attention, say
    # nothing about what has to be computed again.
    if (fields.get("medium") or MAIN_MEMORY) != MAIN_MEMORY or fields.get("group_idx"):
        return None
    hashes = _hashes(fields["block_hashes"])
    if kind == "BlockRemoved":
        return BlocksRemoved(hashes)
    parent, size = fields.get("parent_block_hash"), int(fields["block_size"])
    token_ids, extra = fields["token_ids"], fields.get("extra_keys")
    array("q", token_ids)  # raises unless all are integers of 64 bits
    if size < 1 or len(token_ids) != size * len(hashes):
        return None  # a part of a block, or blocks with gaps between them (sliding windows)
    if extra is None and fields.get("lora_name"):
        extra = [[fields["lora_name"]]] * len(hashes)  # of an older server
    if extra is not None and len(extra) != len(hashes):
        raise ValueError("extra_keys do not fit the blocks")
    if parent is not None:
        _hashes([parent])
    return BlocksStored(hashes, parent, token_ids, size, extra)


def _values(event: Event) -> tuple[str, list[Any]]:
    match event:
        case BlocksStored():
            stored = [
                list(event.hashes), event.parent, list(event.token_ids), event.block_size, None,
                MAIN_MEMORY, None, event.extra_keys,
            ]  # fmt: skip
            return "BlockStored", stored
        case BlocksRemoved():
            return "BlockRemoved", [list(event.hashes), MAIN_MEMORY]
        case _:
            return "AllBlocksCleared", []


def _hashes(given: Any) -> list[BlockHash]:
    if not isinstance(given, list) or not all(isinstance(h, int | bytes) for h in given):
        raise ValueError("block hashes must be numbers or bytes")
    return given
