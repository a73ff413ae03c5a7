import dataclasses

import numpy as np
import pytest

from results import make_result
from tailrace.evaluate.measure.classes import ClassFigures, by_class, merged
from tailrace.sim.result import FINISHED, PENDING
from tailrace.workload.classes import RequestClass, are_distinct

PEOPLE = RequestClass("people", priority=1, ttft_slo_s=1.0)
BATCH = RequestClass("batch", tenant=3, ttft_slo_s=60.0, tpot_slo_s=0.5)
EMPTY = RequestClass("empty", priority=9)


def of_classes(arrived, wait, classes, **more):
    arrived, wait = np.asarray(arrived, float), np.asarray(wait, float)
    result = make_result(arrived, arrived + wait, arrived + wait, **more)
    for k, one in enumerate(classes):
        rows = result.table.rows[k : k + 1]
        one.mark(rows)
        result.table.rows[k] = rows[0]
    return result


def test_each_class_by_itself():
    classes = [PEOPLE, BATCH] * 50
    arrived = np.arange(100.0)
    wait = np.tile([0.5, 7.0], 50)
    wait[10], wait[60] = 3.0, 9.0  # two people waited too long
    found = by_class(of_classes(arrived, wait, classes), [PEOPLE, BATCH, EMPTY], 0.0)
    assert list(found) == ["people", "batch"]
    people, batch = found["people"], found["batch"]
    assert (people.requests, batch.requests) == (50, 50)
    assert people.slo_attainment == 0.96
    assert batch.slo_attainment == 1.0
    assert people.longest_ttft_s == people.worst_ttft_s == 9.0  # one per cent of 50 is one
    assert people.ttft_mean_s == pytest.approx((48 * 0.5 + 3 + 9) / 50)
    assert batch.ttft_mean_s == batch.worst_ttft_s == 7.0
    # One of each every other second, until 95 % have arrived.
    assert people.requests_per_s == pytest.approx(0.5, rel=0.05)
    assert batch.requests_per_s == pytest.approx(0.5, rel=0.1)


def test_the_worst_one_per_cent_is_a_mean():
    wait = np.full(1000, 0.1)
    wait[:10] = np.arange(1.0, 11.0)
    found = by_class(of_classes(np.arange(1000.0), wait, [PEOPLE] * 1000), [PEOPLE], 0.0)
    assert found["people"].worst_ttft_s == pytest.approx(5.5)


def test_warm_up_does_not_count_and_who_gets_no_answer_waits_on():
    result = of_classes(
        [0.0, 1.0, 2.0, 3.0], [50.0, 0.5, 0.5, 9.0], [PEOPLE] * 4, status=[FINISHED] * 3 + [PENDING]
    )
    result.requests["first_token_s"][3] = result.requests["finished_s"][3] = np.nan
    found = by_class(result, [PEOPLE], 0.25)["people"]
    assert found.requests == 3
    assert found.longest_ttft_s == 47.0  # until the end of the run
    assert found.slo_attainment == pytest.approx(2 / 3)


def test_seeds_are_merged():
    one = ClassFigures(10, 1.0, 2.0, 0.1, 0.5, 0.6)
    other = dataclasses.replace(one, requests=20, slo_attainment=0.5, longest_ttft_s=4.0)
    assert merged([{"a": one}, {"a": other, "b": one}]) == {
        "a": ClassFigures(30, 0.75, 2.0, 0.1, 0.5, 4.0),
        "b": one,
    }
    assert merged([{}, {}]) == {}


def test_classes_can_be_told_apart():
    assert are_distinct([PEOPLE, BATCH, EMPTY])
    assert not are_distinct([PEOPLE, dataclasses.replace(PEOPLE, name="same")])
    assert not are_distinct([PEOPLE, dataclasses.replace(BATCH, name="people")])
