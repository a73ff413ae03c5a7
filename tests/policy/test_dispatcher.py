"""The table of rules and the compiled function that reaches them must say the same."""

import ast
import inspect
import re
import textwrap

import numpy as np
import pytest

from policy.views import CALLABLE, make_view
from tailrace.policy import rules
from tailrace.policy.rules import CODE, RULES, Rule, score

each_rule = pytest.mark.parametrize("rule", CALLABLE, ids=lambda rule: rule.name)


def branches() -> list[tuple[str, str]]:
    """All (name of the code, function called) of the if-chain in ``score``."""
    source = inspect.getsource(getattr(score, "py_func", score))
    node = ast.parse(textwrap.dedent(source)).body[0].body[1]
    found = []
    while isinstance(node, ast.If):
        tested = ast.unparse(node.test)
        assert tested.startswith("code == CODE.")
        call = node.body[0].value
        assert [ast.unparse(arg) for arg in call.args] == ["view", "params", "scores"]
        found.append((tested.removeprefix("code == CODE."), call.func.id))
        node = node.orelse[0]
    return found


def test_chain_and_table_agree() -> None:
    assert branches() == [(rule.name, rule.name) for rule in CALLABLE]
    assert [rule.code for rule in RULES] == list(range(len(RULES)))
    assert CODE._asdict() == {rule.name: rule.code for rule in RULES}
    assert len({rule.name for rule in RULES}) == len(RULES)


@each_rule
def test_parameters_are_unpacked_in_the_order_of_the_table(rule: Rule) -> None:
    function = getattr(rules, rule.name)
    source = inspect.getsource(getattr(function, "py_func", function))
    unpacked = re.findall(r"^    (\w+) = params\[(\d+)\]$", source, re.MULTILINE)
    assert unpacked == [(name, str(k)) for k, name in enumerate(rule.params)]
    assert source.count("params[") == len(unpacked)


def test_every_rule_is_described() -> None:
    for rule in RULES:
        assert rule.source
        assert rule.rule_text
        for name in rule.params:
            assert name in rule.rule_text, f"{rule.name} does not say what {name} does"


def test_vector_keeps_the_order_and_takes_changes() -> None:
    rule = next(rule for rule in RULES if rule.name == "cache_aware")
    assert rule.vector().tolist() == [64.0, 1.5, 0.3]
    assert rule.vector({"match_rate": 0.9, "load_gap": 1.0}).tolist() == [1.0, 1.5, 0.9]


@pytest.mark.parametrize("code", [-1, len(CALLABLE), len(RULES)])
def test_an_unknown_code_is_an_error(code: int) -> None:
    with pytest.raises(ValueError, match="no rule of this code"):
        score(code, make_view(), np.zeros(0), np.zeros(3))
