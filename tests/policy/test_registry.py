"""Names to policies, and every mistake a user can make on the way."""

import re
import sys
import textwrap
from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import pytest

from policy.views import make_view
from tailrace.errors import TailraceError
from tailrace.policy import registry, shipped
from tailrace.policy.base import BuiltinPolicy, FunctionPolicy, Policy, checked_scores
from tailrace.policy.learned.policy import LearnedPolicy
from tailrace.policy.registry import get, names, rules
from tailrace.policy.rules import RULES

EXAMPLE = Path(__file__).parents[2] / "examples" / "policies" / "my_rule.py"


def write(folder: Path, text: str, name: str = "mine.py") -> str:
    path = folder / name
    path.write_text(textwrap.dedent(text))
    return str(path)


# ---- built-ins


def test_all_built_in_names_can_be_made() -> None:
    assert rules() == RULES
    assert names() == [*shipped.TRAINED, *(rule.name for rule in RULES)]
    for name in names():
        assert get(name).name == name


@pytest.mark.parametrize(
    "name",
    [
        *("sglang_cache_aware", "smg_cache_aware", "smg_expected_wait", "smg_power_of_two"),
        *("smg_prefix_hash", "rendezvous_hash", "dynamo", "llm_d", "llm_d_sticky", "load_aware"),
        *("aibrix_prefix", "lmetric", "vidur_lor"),
    ],
)
def test_rules_of_other_projects_name_the_version_and_date_of_their_source(name: str) -> None:
    version = {rule.name: rule.version for rule in RULES}[name]
    assert re.search(r"[0-9]", version)
    assert "2026" in version


def test_built_in_parameters_by_name_and_by_keyword() -> None:
    policy = get("cache_aware:match_rate=0.5, load_gap=32")
    assert isinstance(policy, BuiltinPolicy)
    assert policy.params.tolist() == [32.0, 1.5, 0.5]
    assert get("cache_aware:match_rate=0.5", match_rate=0.7).params.tolist() == [64.0, 1.5, 0.7]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("least_outstandin", "unknown policy 'least_outstandin'; did you mean least_outstanding"),
        ("xyzzy", "unknown policy 'xyzzy'; known: "),
        (
            "cache_aware:matchrate=1",
            "unknown parameter of cache_aware 'matchrate'; did you mean match_rate",
        ),
        ("cache_aware:match_rate=much", "cannot read 'match_rate=much'.*'much' is not a number"),
        ("cache_aware:0.5", "cannot read '0.5'.*'=' is missing"),
        ("cache_aware:match_rate=nan", "cache_aware: match_rate must be a finite number, got nan"),
        ("random:x=1", "policy random has no parameters, got 'x'"),
        ("no/such/file.py", "there is no policy file no/such/file.py"),
        ("no_such_module:thing", "cannot import policy module 'no_such_module'"),
        (
            "tailrace.policy.base:Polici",
            "unknown policy in tailrace.policy.base: 'Polici'; did you mean",
        ),
        ("tailrace.policy.rules:RULES", "must be a Policy or a function scores"),
        ("tailrace.errors:TailraceError", "must be a Policy or a function scores"),
    ],
)
def test_mistakes_in_a_name_are_explained(name: str, message: str) -> None:
    with pytest.raises(TailraceError, match=message):
        get(name)


def test_a_parameter_must_be_a_number() -> None:
    with pytest.raises(TailraceError, match="match_rate must be a finite number, got 'much'"):
        get("cache_aware", match_rate="much")


def test_a_rule_of_the_engine_cannot_be_called_alone() -> None:
    policy = get("lookahead")
    assert policy.rule.in_engine
    with pytest.raises(TailraceError, match="lookahead runs inside the simulator"):
        policy.scores(make_view())


# ---- a user's own


def test_a_function_in_a_file(tmp_path: Path) -> None:
    name = write(tmp_path, "def scores(view): return view.replicas['in_flight'] * 2")
    policy = get(name)
    assert policy.name == "mine"
    assert checked_scores(policy, make_view(3, in_flight=[1, 2, 3])).tolist() == [2, 4, 6]


def test_a_function_with_parameters(tmp_path: Path) -> None:
    name = write(tmp_path, "def scores(view, weight=1.0): return weight * view.replicas['queued']")
    assert get(name, weight=3.0).scores(make_view(2, queued=[1, 2])).tolist() == [3, 6]


def test_a_class_in_a_file(tmp_path: Path) -> None:
    text = """
        from tailrace.policy.base import BuiltinPolicy, Policy
        class Mine(Policy):
            def __init__(self, start=0): self.start = start
            def scores(self, view): return view.replicas["in_flight"] + self.start
    """
    name = write(tmp_path, text)
    assert get(name).name == "mine"
    assert get(f"{name}:Mine", start=5).scores(make_view(2)).tolist() == [5, 5]
    with pytest.raises(TailraceError, match=r"cannot make policy mine: .*unexpected keyword"):
        get(name, begin=5)


def test_a_class_may_name_itself(tmp_path: Path) -> None:
    text = """
        from tailrace.policy.base import Policy
        class Mine(Policy):
            name = "greedy"
    """
    assert get(write(tmp_path, text)).name == "greedy"


def test_an_object_in_a_file(tmp_path: Path) -> None:
    text = """
        from tailrace.policy.registry import get
        tuned = get("load_aware:load_weight=0.5")
    """
    name = write(tmp_path, text)
    assert get(f"{name}:tuned").params.tolist() == [0.5]
    with pytest.raises(TailraceError, match="takes no parameters"):
        get(f"{name}:tuned", load_weight=1.0)


def test_something_importable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "def by_queue(view): return view.replicas['queued']", "some_rules.py")
    monkeypatch.syspath_prepend(tmp_path)
    policy = get("some_rules:by_queue")
    assert isinstance(policy, FunctionPolicy)
    assert policy.scores(make_view(2, queued=[4, 5])).tolist() == [4, 5]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1", "holds no policy: write a function scores"),
        ("def scores(view: return 1", "cannot load policy file .*SyntaxError"),
        ("1 / 0", "cannot load policy file .*ZeroDivisionError"),
        (
            "from tailrace.policy.base import Policy\nclass A(Policy): pass\nclass B(Policy): pass",
            "holds 2 policies; say which: .*mine.py:A or .*mine.py:B",
        ),
    ],
)
def test_mistakes_in_a_file_are_explained(tmp_path: Path, text: str, message: str) -> None:
    name = write(tmp_path, text)
    with pytest.raises(TailraceError, match=message):
        get(name)


def test_a_broken_file_leaves_no_module_behind(tmp_path: Path) -> None:
    with pytest.raises(TailraceError):
        get(write(tmp_path, "1 / 0", "broken_rule.py"))
    assert not any("broken_rule" in module for module in sys.modules)


def test_entry_points(monkeypatch: pytest.MonkeyPatch) -> None:
    good = EntryPoint("installed", "tailrace.policy.base:Policy", registry.ENTRY_POINT_GROUP)
    bad = EntryPoint("broken", "no_such_module:Thing", registry.ENTRY_POINT_GROUP)
    shadowed = EntryPoint("random", "no_such_module:Thing", registry.ENTRY_POINT_GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda group: [good, bad, shadowed])
    assert names()[-2:] == ["broken", "installed"]
    assert len(names()) == len(shipped.TRAINED) + len(RULES) + 2
    assert isinstance(get("random"), BuiltinPolicy)
    assert get("installed").name == "installed"
    with pytest.raises(TailraceError, match="cannot load policy broken of no_such_module:Thing"):
        get("broken")


def test_the_example_in_the_documentation_works() -> None:
    policy = get(str(EXAMPLE))
    view = make_view(3, in_flight=[5, 1, 1], cached_tokens=[960, 0, 0], queued_uncached=[0, 0, 50])
    assert int(np.argmin(checked_scores(policy, view))) == 0
    text = (EXAMPLE.parents[2] / "docs" / "policies.md").read_text()
    assert EXAMPLE.read_text().strip() in text


def test_the_documentation_lists_every_rule_as_it_is() -> None:
    text = (EXAMPLE.parents[2] / "docs" / "policies.md").read_text()
    for rule in RULES:
        params = ", ".join(f"{key} = {value:g}" for key, value in rule.params.items())
        assert f"| `{rule.name}` | {rule.source} | {rule.rule_text} | {params} |" in text


# ---- what a policy returns


def returning(value: object) -> Policy:
    return FunctionPolicy(lambda view: value, "mine")


def test_checked_scores_takes_any_array_of_numbers() -> None:
    view = make_view(3)
    for value in ([1, 2, 3], (1.0, np.inf, np.nan), np.arange(3, dtype=np.int8)):
        out = checked_scores(returning(value), view)
        assert out.dtype == np.float64
        np.testing.assert_array_equal(out, np.array(value, float))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1, 2], r"one score per replica, shape \(3,\), got shape \(2,\)"),
        (5.0, r"got shape \(\)"),
        ([[1, 2, 3]], r"got shape \(1, 3\)"),
        (None, "must return 3 numbers, got NoneType"),
        ("abc", "must return 3 numbers, got str"),
        ([1, [2], 3], "must return 3 numbers, got list"),
        ([np.nan] * 3, "returned NaN for every available replica"),
    ],
)
def test_checked_scores_refuses_what_is_no_score(value: object, message: str) -> None:
    with pytest.raises(TailraceError, match=message):
        checked_scores(returning(value), make_view(3))


def test_nan_counts_for_available_replicas_only() -> None:
    policy = returning([np.nan, 1.0, np.nan])
    checked_scores(policy, make_view(3))
    with pytest.raises(TailraceError, match="NaN for every available"):
        checked_scores(policy, make_view(3, available=[1, 0, 1]))
    checked_scores(returning([np.nan] * 3), make_view(3, available=0))


def test_the_base_policy_has_hooks_but_no_scores() -> None:
    policy = Policy()
    policy.reset(4, seed=1)
    for hook in (policy.sent, policy.first_token, policy.finished, policy.failed):
        assert hook(0, 17, 1.5) is None
    with pytest.raises(NotImplementedError, match="Policy has no scores method"):
        policy.scores(make_view())


def test_what_was_tuned_and_trained_is_known_by_name():
    constants = shipped.tuned_constants()
    rule, tuned = next(iter(constants.items()))
    assert (
        get(f"{rule}:tuned").params.tolist() == BuiltinPolicy(get(rule).rule, tuned).params.tolist()
    )
    for name in shipped.LEARNING:
        assert isinstance(get(name), LearnedPolicy)
    with pytest.raises(TailraceError, match="is trained and takes no parameters"):
        get("linear_es", weight=1.0)
    with pytest.raises(TailraceError, match="unknown tuned rule 'round_robin'"):
        get("round_robin:tuned")
