"""Content runs: equal beginnings have equal keys, and nothing else does."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.router.intake.prompt_blocks import (
    BLOCK_BYTES,
    BLOCK_UNITS,
    MAX_BLOCK_BYTES,
    UNIT_BYTES,
    PromptBlocks,
    array_blocks,
    private_block,
    root_of,
    text_blocks,
    token_blocks,
)
from tailrace.router.state import kernels
from tailrace.view import prefix_index

ROOT = root_of("m", "", 7)


def _common(a: PromptBlocks, b: PromptBlocks) -> int:
    """PromptBlocks two prompts have in common from the start on."""
    count = 0
    for left, right in zip(a.keys[:-1], b.keys[:-1], strict=False):
        if left != right:
            break
        count += 1
    return count


@settings(deadline=None)
@given(st.binary(max_size=1500), st.binary(max_size=600), st.binary(max_size=600))
def test_prompts_share_the_whole_blocks_of_their_common_beginning(
    common: bytes, left: bytes, right: bytes
) -> None:
    one, other = text_blocks(common + left, ROOT), text_blocks(common + right, ROOT)
    shared = len(common)
    while shared < min(len(common + left), len(common + right)) and (
        (common + left)[shared] == (common + right)[shared]
    ):
        shared += 1
    whole = _common(one, other)
    if common + left == common + right:
        assert whole == len(one.keys) - 1 or not common + left
    else:
        assert whole == shared // BLOCK_BYTES


@given(st.binary(min_size=1, max_size=3000))
def test_units_add_up(data: bytes) -> None:
    runs = text_blocks(data, ROOT)
    assert runs.units[:-1].sum() == runs.total == -(-len(data) // 4)
    assert (runs.units[:-2] == BLOCK_UNITS).all()
    assert runs.whole == len(data) // BLOCK_BYTES
    assert runs.end_key == runs.keys[-2]
    assert runs.branch_at == -1


@given(st.binary(min_size=1, max_size=1500), st.binary(min_size=1, max_size=900))
def test_the_branch_of_a_turn_is_the_end_of_the_turn_before(first: bytes, rest: bytes) -> None:
    before = text_blocks(first, ROOT)
    after = text_blocks(first + rest, ROOT, (len(first), len(first) + len(rest) // 2))
    assert after.branch_key == before.end_key == after.keys[-1]
    assert after.branch_at == len(before.keys) - 2
    other = bytes([first[0] ^ 1]) + first + rest
    assert text_blocks(other, ROOT, (len(first), 2)).branch_key != before.end_key


def test_the_prefix_hash_is_of_the_first_1024_bytes() -> None:
    text = bytes(range(256)) * 8
    assert text_blocks(text, ROOT).prefix_hash == text_blocks(text[:1024], ROOT).prefix_hash
    assert text_blocks(text, ROOT).prefix_hash != text_blocks(text[1:], ROOT).prefix_hash


def test_token_ids_are_units() -> None:
    runs = token_blocks(list(range(100)), ROOT)
    assert list(runs.units[:-1]) == [64, 36]
    assert _common(runs, token_blocks(list(range(90)), ROOT)) == 1


def test_roots_keep_models_salts_and_installations_apart() -> None:
    roots = {root_of(*args) for args in (("a", "", 1), ("b", "", 1), ("a", "x", 1), ("a", "", 2))}
    assert len(roots) == 4


def test_private_prompts_share_nothing() -> None:
    assert private_block(1, 50).keys[0] != private_block(2, 50).keys[0]
    assert private_block(1, 50).total == 50
    assert text_blocks(b"", ROOT).total == 1


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 40), st.integers(1, 40), st.integers(0, 2000), st.booleans())
def test_searching_finds_what_walking_finds(
    known: int, asked: int, capacity: int, answers: bool
) -> None:
    index = prefix_index.new_index(1, 64)
    rng = np.random.default_rng(known)
    text = rng.integers(0, 255, 64 * BLOCK_BYTES, dtype=np.uint8).tobytes()
    for size in (known // 2, known):
        if size:
            seen = text_blocks(text[: size * BLOCK_BYTES - 3], ROOT)
            prefix_index.insert(index, 0, seen.keys[:-1], seen.units[:-1], capacity, 1.0)
    runs = text_blocks(text[: asked * BLOCK_BYTES], ROOT, (asked * 100, asked * 200))
    walked = prefix_index.match_tokens(index, 0, runs.keys[:-1], runs.units[:-1])
    branch = runs.branch_at if answers else -1
    found = kernels.matched_units(index, 0, runs.keys, runs.units, branch, 1)
    assert found >= walked
    if not answers or prefix_index.match_tokens(index, 0, runs.keys[-1:], runs.units[-1:]) == 0:
        assert found == walked


def test_the_rest_of_a_very_long_prompt_is_one_run() -> None:
    rng = np.random.default_rng(0)
    data = rng.integers(0, 256, MAX_BLOCK_BYTES + 1001, np.uint8)
    other = data.copy()
    other[-1] ^= 1
    blocks, changed = array_blocks(data, 7), array_blocks(other, 7)
    short = array_blocks(data[:MAX_BLOCK_BYTES], 7)
    n = MAX_BLOCK_BYTES // BLOCK_BYTES
    assert blocks.whole == n == len(blocks.keys) - 2
    assert blocks.keys[:n].tolist() == short.keys[:n].tolist() == changed.keys[:n].tolist()
    assert blocks.end_key != changed.end_key
    assert blocks.units[n] == 251
    assert blocks.total == blocks.units.sum() == -(-data.size // UNIT_BYTES)
    answer = (MAX_BLOCK_BYTES - 100, MAX_BLOCK_BYTES + 500)
    assert array_blocks(data, 7, answer).branch_key == array_blocks(data[: answer[0]], 7).end_key
    late = (MAX_BLOCK_BYTES + 100, MAX_BLOCK_BYTES + 500)
    assert array_blocks(data, 7, late).branch_at == -1
