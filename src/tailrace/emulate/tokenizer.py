"""The tokenizer of emulated servers: a token is four bytes of UTF-8.

Every text begins a token of its own and its last token is padded with zero bytes, so a prompt is a
buffer of four bytes per token. A chat message takes two tokens more than its content (role, end),
and the prompt ends with one for the role that is to answer. Token ids are those four bytes as a
little-endian number. Every word of WORDS, with the space before it, is exactly one token; so a
conversation that repeats an answer repeats its tokens. Common tokenizers of real models have these
words as single tokens too.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from tailrace.workload.prefix import mix64

TOKEN_BYTES = 4
_END = b"\x02end"
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)

_TEXT = """
    the and for are but not you all any can had her was one our out day get has him his how man
    new now old see two way who boy did its let put say she too use dad mom act add age ago aid
    aim air arm art ask bad bag bar bat bay bed bet big bit box bus buy cap car cat cow cry cup
    cut dog dry due eat egg end eye far fat few fit fix fly fun gap gas got guy hat hit hot ice
    job key kid lab law lay led leg lie lip lot low map may met mix net nor odd off oil own pay
    pen per pet pop raw red rid row run sad sat sea set sir sit six sky son sum sun tax tea ten
    tie tip top try war wet why win yes yet zoo ace ads ant app arc ash axe bee beg bid bin bow
    bug cab cam cop cue dam den dig dim dot ear ego era eve fan fee fig fin fog fox fur gel gem
    gym ham hay hen hip hop hub hug ink ion jam jar jaw jet joy lap lid log mad mat mud mug nap
    nut oak pad pan pat paw pea pie pig pin pit pod pot pub ram rat ray rib rim rod rub rug sap
    saw shy ski sin sip spa spy tab tag tan tap tar tin toe ton toy tub van vet via wax web wig
    wit zip gut
"""
#: 256 common words of three letters.
WORDS = tuple(_TEXT.split())
_WORD_TOKENS = np.frombuffer("".join(f" {word}" for word in WORDS).encode(), "<u4")


def words(key: int, start: int, end: int) -> bytes:
    """Return words ``start`` to ``end - 1``, a space before each, of the endless text ``key``."""
    with np.errstate(over="ignore"):  # the hash is meant to wrap around
        place = np.uint64(key) + np.arange(start + 1, end + 1, dtype=np.uint64) * _GOLDEN
        tokens: NDArray[np.uint32] = _WORD_TOKENS[mix64(place) >> np.uint64(56)]
    return tokens.tobytes()


def text_tokens(text: str) -> bytes:
    """Return the tokens of a text, four bytes each."""
    data = text.encode("utf-8", "surrogatepass")
    return data + bytes(-len(data) % TOKEN_BYTES)


def chat_tokens(
    messages: Iterable[Any], tools: Any = None, *, add_generation_prompt: bool = True
) -> bytes:
    """Return the tokens of a conversation; raises ValueError if it is none."""
    parts: list[bytes] = []
    if tools:
        parts += [_role("tools"), text_tokens(orjson.dumps(tools).decode()), _END]
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError("every message needs a role")
        parts += [_role(message["role"]), text_tokens(_content(message)), _END]
    if not parts:
        raise ValueError("messages must not be empty")
    if add_generation_prompt:
        parts.append(_role("assistant"))
    return b"".join(parts)


def count(tokens: bytes) -> int:
    """Return the number of tokens of a buffer."""
    return len(tokens) // TOKEN_BYTES


def token_ids(tokens: bytes) -> list[int]:
    """Return the tokens of a buffer as numbers."""
    ids: NDArray[np.uint32] = np.frombuffer(tokens, "<u4")
    return [int(number) for number in ids.tolist()]


def from_ids(ids: Sequence[Any]) -> bytes:
    """Return the buffer of token ids; raises ValueError for what is none."""
    if not all(type(number) is int and 0 <= number < 2**32 for number in ids):
        raise ValueError("token ids must be numbers from 0 to 4294967295")
    return np.array(ids, "<u4").tobytes()


def decode(tokens: bytes) -> str:
    """Return the text of a buffer, without padding."""
    return tokens.replace(b"\0", b"").decode("utf-8", "replace")


def _role(role: str) -> bytes:
    return b"\x01" + role.encode("utf-8", "replace")[:3].ljust(3, b"_")


def _content(message: dict[str, Any]) -> str:
    """Text of a message; what is no text (images, tool calls) counts as its JSON."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for part in content if isinstance(content, list) else [message.get("tool_calls")]:
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            texts.append(part["text"])
        elif part is not None:
            texts.append(orjson.dumps(part).decode())
    return "".join(texts)
