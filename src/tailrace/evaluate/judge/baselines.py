"""The policies of an evaluation: those under test and the baselines."""

import hashlib
import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path

from tailrace.config import Scenario
from tailrace.errors import TailraceError
from tailrace.evaluate.measure.contender import Contender, Role
from tailrace.evaluate.measure.runner import policy_for
from tailrace.files import dumps, write_text
from tailrace.policy import registry, shipped
from tailrace.policy.base import BuiltinPolicy
from tailrace.policy.learned.checkpoint import SHIPPED, SUFFIX
from tailrace.policy.learned.policy import LearnedPolicy

#: Costs are given relative to this rule.
REFERENCE = "least_outstanding"


def contender(name: str, scenario: Scenario, role: Role | None = None) -> Contender:
    """Return a policy as a contender; raises if it does not exist or cannot run the scenario."""
    spec, natural = _resolve(name)
    policy_for(scenario, spec)
    base, suffix = registry.split_order(name)
    label = Path(base).stem + suffix if base.endswith((SUFFIX, ".py")) else name
    return Contender(label, spec, role or natural, fingerprint(spec, scenario))


def _resolve(name: str) -> tuple[str, Role]:
    """Return the registry name of a policy and its default role in an evaluation."""
    base, suffix = registry.split_order(name)
    if suffix:
        spec, role = _resolve(base)
        if suffix.endswith(shipped.TUNED_SUFFIX):
            rule = base + suffix.removesuffix(shipped.TUNED_SUFFIX)
            suffix = shipped.spec_of(rule, shipped.constants_of(rule)).removeprefix(base)
        return spec + suffix, role
    if name.endswith(shipped.TUNED_SUFFIX):
        rule = name.removesuffix(shipped.TUNED_SUFFIX)
        return shipped.spec_of(rule, shipped.constants_of(rule)), Role.TUNED
    if name in shipped.LEARNING:
        shipped.file_of(name)  # raises if it is not trained yet
        return name, Role.LEARNED
    rules = {rule.name: rule for rule in registry.rules()}
    head = name.partition(":")[0]
    if head in rules:
        return name, Role.ORACLE if rules[head].in_engine else Role.RULE
    return name, Role.SUBJECT


def fingerprint(spec: str, scenario: Scenario) -> str:
    """Return a digest of a policy's constants, weights or source file."""
    policy = policy_for(scenario, spec)
    base, suffix = registry.split_order(spec)
    if suffix:
        added = policy.order if suffix.startswith(registry.ORDER_SUFFIX) else policy.holding
        text = f"{fingerprint(base, scenario)} {added}".encode()
    elif isinstance(policy, BuiltinPolicy) and not isinstance(policy, LearnedPolicy):
        rule = policy.rule
        text = f"{rule.name} {rule.version} {policy.params.tolist()}".encode()
    else:
        path = _source(spec)
        text = path.read_bytes() if path is not None else spec.encode()
    return hashlib.sha256(text).hexdigest()[:16]


def _source(spec: str) -> Path | None:
    """Return the file that defines a policy; None if there is none."""
    if spec == registry.SHIPPED_NAME:
        return SHIPPED
    if spec in shipped.LEARNING:
        return shipped.file_of(spec)
    head = spec.partition(":")[0]
    for name in (spec, head):
        if name.endswith((SUFFIX, ".py")):
            return Path(name)
    found = importlib.util.find_spec(head) if ":" in spec else None
    return Path(found.origin) if found is not None and found.origin else None


#: ``ordered``: policies with a tuned order or queue. No part of ``all``: an order needs servers
#: that serve by priority.
GROUPS = ("all", "rules", "tuned", "learned", "ordered", "look-ahead", "none")
#: The best rules of the shipped suites, chosen by an evaluation of all baselines: suite ->
#: {"best_single": policy, "best_of_each": {scenario: policy}}.
BEST_FILE = SHIPPED.parents[1] / "suites" / "best.json"


def recorded_best(scenario_names: Sequence[str]) -> list[str] | None:
    """Return the recorded best rules of some scenarios; None if one has no record."""
    if not BEST_FILE.is_file():
        return None
    names: list[str] = []
    suites = json.loads(BEST_FILE.read_text(encoding="utf-8")).values()
    for scenario in scenario_names:
        found = [suite for suite in suites if scenario in suite["best_of_each"]]
        if not found:
            return None
        names += [found[0]["best_single"], found[0]["best_of_each"][scenario]]
    return list(dict.fromkeys(names))


def record_best(suite: str, best_single: str, best_of_each: dict[str, str]) -> None:
    """Record the best rules of a suite."""
    known = {}
    if BEST_FILE.is_file():
        known = json.loads(BEST_FILE.read_text(encoding="utf-8"))
    known[suite] = {"best_single": best_single, "best_of_each": best_of_each}
    write_text(BEST_FILE, dumps(dict(sorted(known.items()))) + "\n")


def baselines_of(names: Sequence[str], scenario: Scenario) -> list[Contender]:
    """Return the baselines for names and groups (GROUPS); always includes the reference rule."""
    wanted: list[str] = [REFERENCE]
    for name in names:
        wanted += members(name) if name in GROUPS else [name]
    found = [contender(name, scenario) for name in dict.fromkeys(wanted)]
    # A custom policy that was named as a baseline counts as a rule.
    return [
        Contender(c.label, c.spec, Role.RULE, c.fingerprint) if c.role is Role.SUBJECT else c
        for c in found
    ]


def members(group: str) -> list[str]:
    """Return the policies of a group of baselines, one of GROUPS."""
    rules = [rule.name for rule in registry.rules() if not rule.in_engine]
    tuned = shipped.tuned_constants()
    ordered = [name for name in tuned if registry.split_order(name)[1]]
    members = {
        "rules": rules,
        "tuned": [f"{name}{shipped.TUNED_SUFFIX}" for name in tuned if name not in ordered],
        "learned": [n for n in shipped.LEARNING if (shipped.FOLDER / f"{n}{SUFFIX}").is_file()],
        "ordered": [f"{name}{shipped.TUNED_SUFFIX}" for name in ordered],
        "look-ahead": [rule.name for rule in registry.rules() if rule.in_engine],
        "none": [],
    }
    if group == "all":
        return [n for name, names in members.items() if name != "ordered" for n in names]
    return members[group]


def subjects(names: Sequence[str], scenario: Scenario) -> list[Contender]:
    """Return the policies under test; default: the shipped one, if it is installed."""
    if not names and SHIPPED.is_file():
        names = (registry.SHIPPED_NAME,)
    found = [contender(name, scenario) for name in dict.fromkeys(names)]
    labels = [c.label for c in found]
    # Files of the same name are labelled with their full paths.
    return [
        c if labels.count(c.label) == 1 else Contender(c.spec, c.spec, c.role, c.fingerprint)
        for c in found
    ]


def gathered(tested: Sequence[Contender], held_against: Sequence[Contender]) -> list[Contender]:
    """Merge both lists without duplicates; policies under test run first, so errors show early."""
    by_label = {c.label: c for c in tested}
    for c in held_against:
        if by_label.setdefault(c.label, c).fingerprint != c.fingerprint:
            raise TailraceError(
                f"two different policies are called '{c.label}'; rename the file of one of them"
            )
        by_label[c.label] = c  # a rule under test also remains a baseline
    return list(by_label.values())
