"""What a sweep varies, and the trials drawn from it."""

import math
import tomllib

import pytest

from tailrace.errors import TailraceError
from tailrace.integrations.ray import space


def values(text, samples=400, seed=3):
    key, varied = space.read(text)
    return [trial[key] for trial in space.draw({key: varied}, samples, seed)]


def test_plain_values_are_not_varied():
    assert space.read("updates=20") is None
    assert space.read("start=log.tailrace") is None


def test_ranges_are_kept_to_and_used_in_full():
    drawn = values("branching.learning_rate=log(1e-4,1e-2)")
    assert min(drawn) >= 1e-4
    assert max(drawn) <= 1e-2
    below = sum(value < 1e-3 for value in drawn) / len(drawn)
    assert 0.4 < below < 0.6  # the middle of the logarithm
    drawn = values("branching.kl_limit=uniform(0.0, 1)")
    assert 0.4 < sum(drawn) / len(drawn) < 0.6
    assert set(values("branching.epochs=int(4,6)")) == {4, 5, 6}
    assert set(values("advantage=choice('gae', \"branching\")")) == {"gae", "branching"}
    assert values("x=log(0.12345678,0.12345678)", 1) == [0.12345678]


def test_a_trial_does_not_depend_on_how_many_there_are():
    varied = dict([space.read("a.b=log(1,9)"), space.read("c=choice(1,2,3)")])
    few, many = space.draw(varied, 3, 7), space.draw(varied, 9, 7)
    assert many[:3] == few
    assert space.draw(varied, 3, 8) != few
    only = space.draw({"c": varied["c"]}, 3, 7)
    assert [trial["c"] for trial in few] == [trial["c"] for trial in only]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("a=log(0,1)", "above 0"),
        ("a=log(2,1)", "must rise"),
        ("a=uniform(1)", "two numbers"),
        ("a=uniform(1,nan)", "two numbers"),
        ("a=int(1,2.5)", "two whole numbers"),
        ("a=choice()", "nothing to choose from"),
        ("a=choice(ppo,x)", "quotation marks"),
        ("curriculum.0.load=uniform(1,2)", "have a name"),
        ("=log(1,2)", "have a name"),
    ],
)
def test_mistakes_are_named(text, complaint):
    with pytest.raises(TailraceError, match=complaint):
        space.read(text)


def test_settings_survive_as_toml():
    settings = {
        "updates": 3,
        "scenarios": ['a "b"\n.toml', "c"],
        "branching": {"learning_rate": 1e-05, "replay_updates": 6},
        "demonstrations": {"best_teacher": True, "teachers": {"a b": 0.5, "lookahead": 1.0}},
        "curriculum": [{"name": "easy", "load": 0.5}],
    }
    assert tomllib.loads(space.toml(settings)) == settings
    assert math.isclose(tomllib.loads(space.toml({"x": 1 / 3}))["x"], 1 / 3, rel_tol=0)
