"""Queues by name: what can be said, and what is refused."""

import math

import pytest

from tailrace.errors import TailraceError
from tailrace.policy import registry
from tailrace.view.holding import NAMED_ORDERS, Holding
from tailrace.view.ordering import Order


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("max_in_flight=8", Holding(max_in_flight=8)),
        ("max_queued=2,order=wspt", Holding(max_queued=2, order=NAMED_ORDERS["wspt"])),
        ("max_saturation=1,order=edf", Holding(max_saturation=1, order=Order(w=0, d=1))),
        ("max_prefill_s=0.5,w=7,most=9", Holding(max_prefill_s=0.5, order=Order(w=7, most=9))),
        (
            "max_in_flight=4,max_wait_s=2,w=3",
            Holding(max_in_flight=4, max_wait_s=2, order=Order(w=3)),
        ),
    ],
)
def test_a_queue_is_read_and_written_alike(text, wanted):
    policy = registry.get(f"load_aware+queue:{text}")
    assert policy.holding == wanted
    assert policy.name == f"load_aware+queue:{text}"
    assert registry.get(policy.name).holding == wanted
    assert policy.order is None


def test_order_and_queue_go_together_in_either_sequence():
    for name in (
        "load_aware+order:w=5+queue:max_queued=1",
        "load_aware+queue:max_queued=1+order:w=5",
    ):
        policy = registry.get(name)
        assert policy.order == Order(w=5)
        assert policy.holding == Holding(max_queued=1)
        assert policy.name == name
    assert registry.get("load_aware").holding is None


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "nobody ever waits"),
        (":order=wspt", "nobody ever waits"),
        (":max_in_flight=0", "above 0"),
        (":max_wait_s=nan,max_queued=1", "above 0"),
        (":max_flight=1", "max_in_flight"),
        (":max_queued=1,order=lifo", "order of a queue"),
        (":max_queued=one", "not a number"),
        (":max_queued=1,class_s=3", "setting of a queue"),
    ],
)
def test_what_makes_no_queue_is_refused(text, why):
    with pytest.raises(TailraceError, match=why):
        registry.get("load_aware+queue" + text)


def test_only_the_gate_reads_metrics():
    assert Holding(max_saturation=1).uses_metrics
    assert not Holding(max_in_flight=1).uses_metrics
    assert Holding(max_in_flight=1).max_queued == math.inf
