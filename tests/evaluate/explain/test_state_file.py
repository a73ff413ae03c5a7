"""Situations from files: the router sees what they say, and reasons name what decides."""

from pathlib import Path

import numpy as np
import pytest

from policy.networks import random_policy, random_tensors, small
from tailrace.errors import TailraceError
from tailrace.evaluate.explain import audit as audits
from tailrace.evaluate.explain.explain_state import NOT_ASKED, explain_state, shown, unscaled
from tailrace.evaluate.explain.state_file import read, view_of
from tailrace.policy import registry
from tailrace.policy.learned.observation import (
    N_REPLICA_FEATURES,
    N_REQUEST_FEATURES,
    REPLICA_FEATURES,
    REQUEST_FEATURES,
    Feature,
    observe,
)
from tailrace.policy.learned.policy import LearnedPolicy

EXAMPLES = Path(__file__).parents[3] / "examples" / "states"
STATE = """
arrival_rate = 6.0
[request]
prompt_tokens = 4000
predicted_output = 100
turn = 2
last_replica = 1
ttft_slo_s = 2.0
waited_s = 0.5
[[replicas]]
queued = 3
answering = 4
oldest_wait_s = 0.8
speed = 0.5
tokens_per_s = 300.0
[[replicas]]
answering = 1
context_tokens = 2500
tokens_to_come = 70
cached_tokens = 1000
index_tokens = 9000
metrics_age_s = 2.0
waiting = 5
kv_used = 0.25
mean_in_flight = 3.0
[[replicas]]
available = false
"""


@pytest.fixture
def state(tmp_path):
    def write(text=STATE):
        path = tmp_path / "state.toml"
        path.write_text(text)
        return path

    return write


def quantities(state):
    """What a policy would see, in natural units: [replica][name], and of the request."""
    view = view_of(state)
    replica_obs = np.zeros((len(view.replicas), N_REPLICA_FEATURES), np.float32)
    request_obs = np.zeros(N_REQUEST_FEATURES, np.float32)
    observe(view, replica_obs, request_obs)
    own = [k for k, f in enumerate(REPLICA_FEATURES) if "_vs_" not in f.name]
    replicas = [
        {REPLICA_FEATURES[k].name: unscaled(REPLICA_FEATURES[k], float(row[k])) for k in own}
        for row in replica_obs
    ]
    request = {
        f.name: unscaled(f, float(v)) for f, v in zip(REQUEST_FEATURES, request_obs, strict=True)
    }
    return replicas, request


def test_the_router_sees_what_the_file_says(state) -> None:
    (first, second, _), request = quantities(read(state()))
    expected = {
        "queued": 3,
        "in_flight": 7,
        "oldest_wait": 0.8,
        "mean_wait": 0.4,
        "queued_tokens": 3000,
        "queued_uncached": 3000,
        "context": 4000,
        "tokens_to_come": 500,
        "throughput": 300,
        "trend": 0,
        "has_metrics": 0,
        "waiting": 3,
        "cached": 0,
        "uncached": 4000,
        "is_last": 0,
    }
    assert {k: first[k] for k in expected} == pytest.approx(expected, rel=1e-4)
    expected = {
        "queued": 0,
        "in_flight": 1,
        "context": 2500,
        "tokens_to_come": 70,
        "trend": -2,
        "kv_used": 0.25,
        "waiting": 5,
        "metrics_age": 2,
        "has_metrics": 1,
        "cached": 1000,
        "cached_share": 0.25,
        "uncached": 3000,
        "is_last": 1,
    }
    assert {k: second[k] for k in expected} == pytest.approx(expected, rel=1e-4)
    assert second["speed"] == pytest.approx(2 * first["speed"], rel=1e-4)
    expected = {
        "prompt": 4000,
        "predicted_output": 100,
        "waited": 0.5,
        "turn": 2,
        "in_session": 1,
        "ttft_slo": 2,
        "replicas": 2,
        "arrival_rate": 3,
    }
    assert {k: request[k] for k in expected} == pytest.approx(expected, rel=1e-4)


def test_a_count_stands_for_several_replicas(state) -> None:
    view = view_of(read(state("[[replicas]]\ncount = 3\nqueued = 2\n")))
    assert view.replicas["queued"].tolist() == [2, 2, 2]


def test_every_scaling_has_a_way_back() -> None:
    for feature in (*REPLICA_FEATURES, *REQUEST_FEATURES):
        if "_vs_" not in feature.name:
            assert np.isfinite(unscaled(feature, 0.5))
            assert shown(feature, 0.5)
    with pytest.raises(ValueError, match="no way back from the scaling 'x squared'"):
        unscaled(Feature("a", "s", "x squared", "ledger", ""), 0.5)


# ---- answers ------------------------------------------------------------------------------------


def only(feature):
    """A network that reads one feature of replicas."""
    config = small()
    tensors = random_tensors(config, 3)
    column = [f.name for f in REPLICA_FEATURES].index(feature)
    weight = tensors["actor.input.weight"]
    weight[:, np.arange(weight.shape[1]) != column] = 0
    return LearnedPolicy(config, tensors)


def test_the_policy_is_asked_as_in_a_run(state) -> None:
    given = read(state())
    for variant in ("plain", "memory", "prior", "all"):
        policy = random_policy(variant)
        found = explain_state(policy, given, "x")
        scores = policy.copy().scores(view_of(given))
        assert found.chosen == scores.argmin()
        for option, score in zip(found.options, scores, strict=True):
            if option.available:
                assert option.logit == pytest.approx(-score, abs=1e-3)
            else:
                assert (option.logit, option.probability, option.reasons) == (None, 0, ())
        assert sum(option.probability for option in found.options) == pytest.approx(1)


def test_the_reason_is_what_the_policy_reads(state) -> None:
    found = explain_state(only("cached_share"), read(state()), "x")
    first, second = (option.reasons[0] for option in found.options[:2])
    assert first.name == second.name == "cached_share"
    assert first.text == "share of the prompt believed cached here: 0%, elsewhere 25%"
    assert abs(first.effect) > 1e-4
    for option in found.options[:2]:
        assert all(abs(r.effect) < 1e-6 for r in option.reasons[1:])
    # A comparison tells of the same quantity, with the same words.
    compared = explain_state(only("cached_share_vs_mean"), read(state()), "x").options[0].reasons[0]
    assert (compared.name, compared.text) == (first.name, first.text)


def test_a_single_replica_has_no_elsewhere(state) -> None:
    (option,) = explain_state(only("queued"), read(state("[[replicas]]\nqueued = 2")), "x").options
    assert option.probability == 1
    assert not any("elsewhere" in reason.text for reason in option.reasons)


def test_rules_are_asked_too(state) -> None:
    found = explain_state(random_policy(), read(state()), "x")
    assert set(found.rules) == {
        r.name for r in registry.rules() if not r.in_engine and r.name not in NOT_ASKED
    }
    assert found.rules["least_outstanding"] == (1,)
    assert found.rules["sticky_session"] == (1,)
    equal = explain_state(random_policy(), read(state("[[replicas]]\ncount = 2")), "x")
    assert equal.rules["least_outstanding"] == (0, 1)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.toml")), ids=lambda p: p.stem)
def test_every_example_works_and_says_how_to_run_it(path) -> None:
    found = explain_state(random_policy(), read(path), path.stem)
    assert found.description
    assert f"--state examples/states/{path.name}" in path.read_text()


# ---- mistakes -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "replicas"),
        ("replicas = []", "replicas"),
        ("[[replicas]]\nqeued = 1", "did you mean replicas.0.queued"),
        ("[[replicas]]\nqueued = -1", "replicas.0.queued"),
        ("[[replicas]]\navailable = false", "none of its replicas is available"),
        ("[request]\nlast_replica = 2\n[[replicas]]\ncount = 2", "there are only 2"),
        ("[request]\nprompt_tokens = 10\n[[replicas]]\ncached_tokens = 10", "must be below"),
        ("[[replicas]", "not valid TOML"),
    ],
)
def test_a_state_that_makes_no_sense(state, text, message) -> None:
    with pytest.raises(TailraceError, match=message) as caught:
        read(state(text))
    assert "state.toml" in str(caught.value)


def test_too_many_replicas_to_explain(state, monkeypatch) -> None:
    monkeypatch.setattr(audits, "MAX_EXPLAINED", 3)
    with pytest.raises(TailraceError, match="up to 3 replicas, not 4"):
        explain_state(random_policy(), read(state("[[replicas]]\ncount = 4")), "x")
