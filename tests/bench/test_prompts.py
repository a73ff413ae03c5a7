import numpy as np
import pytest

from tailrace.bench.prompts import Piece, PromptWriter, spoken
from tailrace.emulate import tokenizer
from tailrace.workload import library
from tailrace.workload.table import RequestTable


def table_of(*runs, **columns):
    """One request per list of (segment, tokens)."""
    prompt = np.array([sum(tokens for _, tokens in r) for r in runs])
    return RequestTable.build(
        np.arange(len(runs), dtype=float),
        prompt,
        np.full(len(runs), 4),
        list(map(list, runs)),
        **columns,
    )


def shared_words(a, b):
    """Number of words two texts have in common from the start on."""
    same = np.array(a[: len(b)].split()) == np.array(b[: len(a)].split())
    return len(same) if same.all() else int(np.argmin(same))


def test_prompts_share_text_exactly_as_far_as_content():
    writer = PromptWriter(
        table_of(
            [(1, 40), (2, 30)],
            [(1, 40), (2, 50)],
            [(1, 40), (3, 30)],
            [(1, 41), (2, 30)],
            [(9, 70)],
        )
    )
    texts = [writer.write(row).text() for row in range(5)]
    assert [len(text) // 4 for text in texts] == [70, 90, 70, 71, 70]
    assert [shared_words(texts[0], other) for other in texts[1:]] == [70, 40, 40, 0]


def test_requests_without_runs_share_nothing():
    table = RequestTable.build(np.zeros(2), np.array([50, 50]), np.array([1, 1]))
    texts = [PromptWriter(table).write(row).text() for row in (0, 1)]
    assert shared_words(*texts) == 0


@pytest.mark.parametrize("per", [0.25, 0.8, 1.0, 1.7])
def test_length_follows_the_tokenizer(per):
    table = table_of([(1, 1000), (2, 500)], [(1, 1000), (2, 700)])
    texts = [PromptWriter(table, per).write(row).text() for row in (0, 1)]
    assert [len(text) // 4 for text in texts] == [
        round(1000 * per) + round(n * per) for n in (500, 700)
    ]
    assert texts[1].startswith(texts[0])


def test_another_salt_gives_other_texts_that_share_alike():
    table = table_of([(1, 40), (2, 30)], [(1, 40), (3, 30)])
    plain, salted = (
        [PromptWriter(table, salt=salt).write(row).text() for row in (0, 1)] for salt in (0, 5)
    )
    assert shared_words(plain[0], salted[0]) == 0
    assert shared_words(*plain) == shared_words(*salted) == 40
    again = [PromptWriter(table, salt=5).write(row).text() for row in (0, 1)]
    assert again == salted


def test_a_turn_repeats_the_answer_that_really_came():
    table = table_of(
        [(1, 20), (2, 10)], [(1, 20), (2, 24)], parent=np.array([-1, 0]), turn=np.array([0, 1])
    )
    writer = PromptWriter(table)
    first = writer.write(0)
    answer = tokenizer.words(77, 0, 4)
    second = writer.write(1, spoken(first, answer, 4))
    assert second.text().startswith(first.text() + answer)
    assert len(second.text()) // 4 == 44
    assert [piece.role for piece in second.pieces] == ["system", "user", "assistant", "user"]
    assert second.pieces[2] == Piece("assistant", answer)
    third = spoken(second, b" one", 1)
    assert third.tokens == 25
    assert [piece.role for piece in third.pieces] == ["user", "assistant", "user", "assistant"]


def test_an_answer_that_does_not_fit_the_table_is_left_out():
    table = table_of([(2, 10)], [(2, 11)], [(3, 50)])
    writer = PromptWriter(table)
    so_far = spoken(writer.write(0), b" was" * 4, 4)
    assert writer.write(1, so_far).text() == writer.write(1).text()  # shorter than what was said
    assert writer.write(2, so_far).text() == writer.write(2).text()  # another stream


def test_messages_are_json():
    import orjson

    writer = PromptWriter(table_of([(1, 3), (2, 2)]))
    first = writer.write(0)
    answer = orjson.dumps('say "no"\n')[1:-1]
    so_far = spoken(first, answer, 0)
    messages = orjson.loads(writer.write(0, so_far).messages())
    assert [m["role"] for m in messages] == ["system", "user", "assistant"]
    assert messages[2]["content"] == 'say "no"\n'


def test_prompts_of_every_workload_have_the_right_length():
    for name in library.names():
        table = library.make(name, 20, 5.0, 1)
        writer = PromptWriter(table)
        for row in range(len(table)):
            assert len(writer.write(row).text()) == 4 * table.rows["prompt_tokens"][row]
