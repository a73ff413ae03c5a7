"""The compiled reader of chunked bodies against the one for responses."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from tailrace.net.chunk_kernel import RequestChunks
from tailrace.net.framing import MAX_CHUNK_LINE, BrokenMessageError, ChunkedReader

PIECES = st.sampled_from(
    [b"0", b"1", b"5", b"a", b"F", b"00000001", b"123456789", b"\r\n", b"\n", b"\r", b";", b"x=y",
     b"hello", b"h", b"A: b", b":", b" ", b"\0", b"0\r\n\r\n", b"2\r\nab\r\n", b"1;a=b\r\nc\r\n",
     b"0\r\nA: b\r\n\r\n", b"GET"]
)  # fmt: skip


def read(reader: RequestChunks | ChunkedReader, pieces: list[bytes]) -> tuple[str, bytes, int]:
    """How a body ends, its data, and how many bytes belong to it."""
    data, count = b"", 0
    for piece in pieces:
        try:
            end, parts = reader.feed(piece)
        except BrokenMessageError:
            return "broken", b"", 0
        data += parts if isinstance(parts, bytes) else b"".join(parts)
        count += end
        if reader.done:
            return "done", data, count
    return "open", data, count


@given(st.lists(PIECES, max_size=12), st.lists(st.integers(0, 60), max_size=4))
def test_both_readers_agree(pieces: list[bytes], cuts: list[int]) -> None:
    data = b"".join(pieces)
    places = sorted({0, *(min(c, len(data)) for c in cuts), len(data)})
    cut = [data[a:b] for a, b in itertools.pairwise(places)]
    compiled, python = read(RequestChunks(), cut), read(ChunkedReader(), cut)
    if python[0] == "open" and compiled[0] == "broken":
        # It refuses a line that cannot become valid; the other waits for its end.
        assert read(ChunkedReader(), [*cut, b"\r\n\r\n"])[0] == "broken"
    else:
        assert compiled == python


def test_limits() -> None:
    for line, state in ((MAX_CHUNK_LINE, "open"), (MAX_CHUNK_LINE + 1, "broken")):
        assert read(RequestChunks(), [b"1;" + b"a" * (line - 2)])[0] == state
    trailers = b"0\r\n" + b"a: b\r\n" * 3000
    assert read(RequestChunks(), [trailers])[0] == "broken"


def test_framing_and_data_are_counted() -> None:
    reader = RequestChunks()
    reader.feed(b"3;x\r\nabc\r\n10\r\nab")
    assert (reader.announced, reader.framing) == (3 + 16, 5 + 2 + 4)
