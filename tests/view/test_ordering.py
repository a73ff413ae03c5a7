"""Keys by which requests are served: guarantees that hold for any of them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.errors import TailraceError
from tailrace.policy import registry
from tailrace.view.ordering import Order, order_row, priority_number, priority_of

times = st.floats(0, 1e6)
works = st.floats(0, 1e4)
weights = st.floats(0, 1e3)


@given(times, works, st.floats(0, 100), st.integers(-5, 5), weights, st.floats(0, 10), weights)
def test_compiled_and_plain_agree(arrived, work, target, urgency, w, d, most):
    order = Order(w=w, d=d, most=most)
    plain = priority_number(order, arrived, work, target, urgency)
    with np.errstate(all="ignore"):
        assert plain == priority_of(order_row(order), arrived, work, target, urgency)


@given(times, works, works, weights, weights, st.floats(0, 1e4))
def test_nobody_is_overtaken_by_one_that_came_much_later(arrived, work, other, w, most, later):
    order = Order(w=w, most=most)
    early = priority_number(order, arrived, work, 1.0, 0)
    late = priority_number(order, arrived + most + later, other, 1.0, 0)
    assert early <= late + 1  # a step of rounding


@given(times, works, works, st.floats(0, 100))
def test_of_two_that_came_together_the_shorter_goes_first(arrived, work, more, w):
    order = Order(w=w)
    short = priority_number(order, arrived, work, 1.0, 0)
    assert short <= priority_number(order, arrived, work + more, 1.0, 0)


@given(times, works, works, st.integers(-5, 5), st.integers(1, 5), st.floats(0, 500))
def test_a_more_urgent_class_goes_first_but_not_for_ever(arrived, a, b, urgency, steps, later):
    order = Order(w=5, most=30, class_s=600)
    plain = priority_number(order, arrived, a, 1.0, urgency)
    urgent = priority_number(order, arrived + later, b, 1.0, urgency + steps)
    assert urgent < plain
    next_day = priority_number(order, arrived + 600 * steps + 31, b, 1.0, urgency + steps)
    assert next_day > plain - 1


def test_earliest_deadline_first():
    order = Order(w=0, d=1)
    due = [priority_number(order, at, 3.0, target, 0) for at, target in ((0, 9), (1, 2), (2, 5))]
    assert due == [9000, 3000, 7000]


def test_without_an_order_a_clients_priority_counts_alone():
    assert priority_of(order_row(None), 5.0, 3.0, 1.0, 7) == -7


def test_a_policy_with_an_order_decides_as_without():
    plain, ordered = registry.get("load_aware"), registry.get("load_aware+order:w=2,most=9")
    assert ordered.order == Order(w=2, most=9)
    assert plain.order is None
    assert ordered.name == "load_aware+order:w=2,most=9"
    assert (ordered.rule, ordered.params.tolist()) == (plain.rule, plain.params.tolist())
    assert registry.get("load_aware+order").order == Order()
    assert registry.get("cache_aware:match_rate=0.5+order:w=2").name == "cache_aware+order:w=2"
    assert registry.get("linear_es+order").order == Order()


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("load_aware+order:x=1", "weight of an order"),
        ("load_aware+order:w=-1", "from 0 to 1e6"),
        ("load_aware+order:w=nan", "from 0 to 1e6"),
        ("load_aware+order:w", "'=' is missing"),
        ("nothing+order:w=1", "nothing"),
        ("round_robin+order:tuned", "tuned"),
    ],
)
def test_a_bad_order_is_named(name, why):
    with pytest.raises(TailraceError, match=why):
        registry.get(name)
