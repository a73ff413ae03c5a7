import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.emulate import tokenizer
from tailrace.emulate.replica import chained_names


def test_words_are_one_token_each():
    assert len(set(tokenizer.WORDS)) == 256
    assert all(len(word) == 3 and word.isascii() and word.islower() for word in tokenizer.WORDS)
    text = tokenizer.words(7, 0, 50).decode()
    assert tokenizer.count(tokenizer.text_tokens(text)) == 50
    assert text.split() == [w for w in text.split() if w in tokenizer.WORDS]


def test_a_text_can_be_had_in_parts():
    whole = tokenizer.words(3, 0, 40)
    assert tokenizer.words(3, 0, 15) + tokenizer.words(3, 15, 40) == whole
    assert tokenizer.words(4, 0, 40) != whole
    assert len(set(np.frombuffer(tokenizer.words(5, 0, 4096), "<u4"))) == 256


@given(st.text())
def test_any_text_comes_back(text):
    tokens = tokenizer.text_tokens(text)
    assert tokenizer.count(tokens) == -(-len(text.encode()) // 4)
    assert tokenizer.from_ids(tokenizer.token_ids(tokens)) == tokens
    assert tokenizer.decode(tokens) == text.replace("\0", "")


def test_a_conversation_that_goes_on_keeps_its_tokens():
    first = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "odd"}]
    answer = tokenizer.words(1, 0, 20)
    before = tokenizer.chat_tokens(first) + answer
    then = [
        *first,
        {"role": "assistant", "content": answer.decode()},
        {"role": "user", "content": "x"},
    ]
    assert tokenizer.chat_tokens(then).startswith(before)


def test_messages_in_parts_and_tool_calls_count():
    plain = tokenizer.chat_tokens([{"role": "user", "content": "one two"}])
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    assert tokenizer.chat_tokens([{"role": "user", "content": parts}]) == plain
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "a"}]}
    assert tokenizer.count(tokenizer.chat_tokens([call])) > 3
    assert tokenizer.count(tokenizer.chat_tokens([call], [{"name": "f"}])) > 6


@pytest.mark.parametrize("messages", [[], ["hi"], [{"content": "x"}], [{"role": 3}]])
def test_what_is_no_conversation_is_refused(messages):
    with pytest.raises(ValueError, match=r"role|empty"):
        tokenizer.chat_tokens(messages)


@pytest.mark.parametrize("ids", [[-1], [2**32], ["a"], [1.5], [None], [True]])
def test_what_is_no_token_id_is_refused(ids):
    with pytest.raises(ValueError, match="token ids"):
        tokenizer.from_ids(ids)


def test_block_names_agree_as_far_as_the_tokens_do():
    tokens = tokenizer.words(1, 0, 64)
    names = chained_names(tokens, 16)
    assert len(names) == 4
    assert chained_names(tokens[:-4], 16) == names[:3]
    changed = chained_names(tokens[:80] + b"\0\0\0\0" + tokens[84:], 16)
    assert changed[0] == names[0]
    assert not set(changed[1:]) & set(names)
