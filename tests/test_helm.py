"""The Helm chart in deploy/: rendered by a real helm, checked against the schemas of Kubernetes."""

import json
import os
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import click
import pytest

from tailrace.cli import cli
from tailrace.config import parse
from tailrace.errors import TailraceError
from tailrace.router.serve_settings import ServeSettings

pytestmark = pytest.mark.helm

ROOT = Path(__file__).parents[1]
BIN = Path(os.environ.get("HELM_BIN", ROOT / ".venv-helm/bin"))
CHART = ROOT / "deploy" / "helm" / "tailrace"
#: Definitions that only some clusters have: required fields, and all that may be there.
CUSTOM: dict[str, dict[str, Any]] = {
    "ServiceMonitor": {"selector": dict, "endpoints": list},
    "InferencePool": {"selector": dict, "targetPorts": list, "endpointPickerRef": dict},
}
SERVICE = {"settings": {"discovery": {"kubernetes": {"service": "vllm", "port": 8000}}}}
POOL = {
    "picker": {
        "enabled": True,
        "inferencePool": {
            "create": True, "name": "llama", "selector": {"app": "vllm"}, "targetPorts": [8000],
        },
    },
    "settings": {"discovery": {"kubernetes": {"pool": "llama"}}},
}  # fmt: skip
EVERYTHING = {
    "router": {"enabled": True, "processes": 4, "replicas": 2},
    "picker": POOL["picker"],
    "settings": {
        "discovery": {"kubernetes": {"pool": "llama", "namespace": "llm"}},
        "lame_duck_s": 3, "drain_s": 120, "limits": {"body_bytes": 1_000_000},
        "clients": [{"name": "a", "key_env": "A_KEY", "requests_per_s": 2.5}],
        "routing": {"policy": "load_aware"},
    },
    "tls": {"secretName": "certs", "clientCertificates": True},
    "admin": {"existingSecret": "own", "key": "t"},
    "envFrom": [{"secretRef": {"name": "keys"}}],
    "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    "autoscaling": {"enabled": True, "target": {"name": "vllm"}},
    "imagePullSecrets": [{"name": "pull"}], "nodeSelector": {"kind": "cpu"},
    "tolerations": [{"key": "x", "operator": "Exists"}], "podAnnotations": {"a": "b"},
    "affinity": {"nodeAffinity": {}}, "serviceAccount": {"annotations": {"c": "d"}},
}  # fmt: skip
CASES = {"service": SERVICE, "pool": POOL, "everything": EVERYTHING}


def helm(values: dict[str, Any], *arguments: str) -> subprocess.CompletedProcess[str]:
    given = {"image": {"repository": "registry.example/tailrace"}, **values}
    return subprocess.run(
        [str(BIN / "helm"), *arguments, "--namespace", "llm", "-f", "-"],
        input=json.dumps(given), capture_output=True, text=True, check=False,
    )  # fmt: skip


def rendered(values: dict[str, Any]) -> list[dict[str, Any]]:
    done = helm(values, "template", "demo", str(CHART))
    assert done.returncode == 0, done.stderr
    # PyYAML is in helm's environment.
    load = (
        "import json, sys, yaml; print(json.dumps([d for d in yaml.safe_load_all(sys.stdin) if d]))"
    )
    found = subprocess.run(
        [str(BIN / "python"), "-c", load], input=done.stdout, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    return list(json.loads(found.stdout))


def of(found: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [item for item in found if item["kind"] == kind]


@pytest.mark.parametrize("case", CASES)
def test_lint(case: str) -> None:
    done = helm(CASES[case], "lint", str(CHART), "--strict")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("case", CASES)
def test_every_object_fits_its_schema(case: str, tmp_path: Path) -> None:
    found = rendered(CASES[case])
    plain = [item for item in found if item["kind"] not in CUSTOM]
    assert plain
    for number, item in enumerate(plain):
        (tmp_path / f"{number}.yaml").write_text(json.dumps(item))
    files = sorted(str(path) for path in tmp_path.iterdir())
    for version in ("1.27", "1.37"):
        done = subprocess.run(
            [str(BIN / "kubernetes-validate"), "--strict", "-k", version, *files],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
    for item in found:
        fields = CUSTOM.get(item["kind"])
        if fields is not None:
            assert {name: type(value) for name, value in item["spec"].items()} == fields


@pytest.mark.parametrize("case", CASES)
def test_the_settings_are_those_of_the_router(case: str) -> None:
    found = rendered(CASES[case])
    (settings,) = of(found, "ConfigMap")
    deployments = of(found, "Deployment")
    assert len(settings["data"]) == len(deployments)
    for name, text in settings["data"].items():
        read = parse(ServeSettings, tomllib.loads(text))
        (pod,) = [
            d["spec"]["template"] for d in deployments
            if d["spec"]["template"]["spec"]["containers"][0]["name"] == name.removesuffix(".toml")
        ]  # fmt: skip
        (container,) = pod["spec"]["containers"]
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert read.listen == f"0.0.0.0:{ports['requests']}"
        assert read.admin.listen == f"0.0.0.0:{ports['admin']}"
        assert read.discovery.is_used
        given = {entry["name"] for entry in container["env"]}
        assert read.admin.token_env in given
        limit = read.lame_duck_s + read.drain_s
        assert limit < pod["spec"]["terminationGracePeriodSeconds"] <= limit + 15
        program, command, option, path = container["command"]
        assert program.endswith("tailrace")
        known = cli.get_command(click.Context(cli), command)
        assert known is not None
        assert option == "--config"
        assert option in [name for parameter in known.params for name in parameter.opts]
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        assert path == f"/etc/tailrace/{name}"
        assert set(mounts.values()) == {volume["name"] for volume in pod["spec"]["volumes"]}
        if read.tls.certificate is not None:
            assert str(read.tls.certificate.parent) in mounts
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            assert container[probe]["httpGet"]["port"] in ports


@pytest.mark.parametrize("case", CASES)
def test_selectors_find_the_pods(case: str) -> None:
    found = rendered(CASES[case])
    pods = [d["spec"]["template"]["metadata"]["labels"] for d in of(found, "Deployment")]
    selectors = [
        *(d["spec"]["selector"]["matchLabels"] for d in of(found, "Deployment")),
        *(b["spec"]["selector"]["matchLabels"] for b in of(found, "PodDisruptionBudget")),
        *(s["spec"]["selector"] for s in of(found, "Service")),
    ]
    for selector in selectors:
        assert sum(selector.items() <= labels.items() for labels in pods) == 1
    for monitor in of(found, "ServiceMonitor"):
        wanted = monitor["spec"]["selector"]["matchLabels"]
        services = [s for s in of(found, "Service")
                    if wanted.items() <= s["metadata"]["labels"].items()]  # fmt: skip
        assert len(services) == len(pods)
        (endpoint,) = monitor["spec"]["endpoints"]
        assert all(endpoint["port"] in [p["name"] for p in s["spec"]["ports"]] for s in services)
        # The metrics are behind the token of the admin listener.
        assert endpoint["authorization"]["credentials"] == {"name": "own", "key": "t"}
    for pool in of(found, "InferencePool"):
        reference = pool["spec"]["endpointPickerRef"]
        (service,) = [s for s in of(found, "Service") if s["metadata"]["name"] == reference["name"]]
        assert reference["port"]["number"] in [p["port"] for p in service["spec"]["ports"]]
        assert reference["failureMode"] == "FailClose"


@pytest.mark.parametrize("case", CASES)
def test_the_account_may_watch_and_nothing_else(case: str) -> None:
    found = rendered(CASES[case])
    (role,), (binding,), (account,) = (
        of(found, kind) for kind in ("Role", "RoleBinding", "ServiceAccount")
    )
    rules = {(rule["apiGroups"][0], rule["resources"][0]) for rule in role["rules"]}
    assert rules == {
        ("", "pods"), ("discovery.k8s.io", "endpointslices"),
        ("inference.networking.k8s.io", "inferencepools"),
    }  # fmt: skip
    assert {verb for rule in role["rules"] for verb in rule["verbs"]} == {"get", "list", "watch"}
    assert binding["subjects"][0]["name"] == account["metadata"]["name"]
    for deployment in of(found, "Deployment"):
        assert (
            deployment["spec"]["template"]["spec"]["serviceAccountName"]
            == (account["metadata"]["name"])
        )


def test_a_token_is_made_unless_there_is_one() -> None:
    (secret,) = of(rendered(SERVICE), "Secret")
    assert len(secret["data"]["token"]) > 40
    assert not of(rendered(EVERYTHING), "Secret")


def test_the_autoscaler_follows_the_routers_wish() -> None:
    assert not of(rendered(SERVICE), "HorizontalPodAutoscaler")
    (scaler,) = of(rendered(EVERYTHING), "HorizontalPodAutoscaler")
    (metric,) = scaler["spec"]["metrics"]
    assert metric["external"]["metric"]["name"] == "tailrace_replicas_wanted"
    assert metric["external"]["target"] == {"type": "AverageValue", "averageValue": "1"}


def test_with_the_autoscaler_the_router_computes_its_wish() -> None:
    """Only the autopilot does, from the decision log; the root of the file system is read-only."""

    def settings(values: dict[str, Any]) -> ServeSettings:
        (found,) = of(rendered(values), "ConfigMap")
        return parse(ServeSettings, tomllib.loads(found["data"]["serve.toml"]))

    assert settings(SERVICE).autopilot.mode == "off"
    scaling = {"autoscaling": {"enabled": True, "target": {"name": "vllm"}}}
    made = settings({**SERVICE, **scaling})
    assert made.autopilot.mode == "suggest"
    assert made.decisions.folder == Path("/tmp/decisions")
    own = {"autopilot": {"mode": "act"}, "decisions": {"folder": "/data"}}
    given = settings({"settings": {**SERVICE["settings"], **own}, **scaling})
    assert given.autopilot.mode == "act"
    assert given.decisions.folder == Path("/data")


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"image": {"repository": ""}}, "build the image with deploy/Containerfile"),
        ({"settings": {"listen": "0.0.0.0:1"}}, "listen"),
        ({"picker": {"enabled": True, "inferencePool": {"create": True}}}, "inferencePool.name"),
        ({"autoscaling": {"enabled": True}}, "autoscaling.target.name"),
        ({"router": {"processes": 0}}, "processes"),
    ],
)
def test_what_is_missing_is_told(values: dict[str, Any], told: str) -> None:
    done = helm(values, "template", "demo", str(CHART))
    assert done.returncode != 0
    assert told in done.stderr


def test_a_wrong_setting_would_be_found() -> None:
    text = rendered({"settings": {"discovery": {"kubernetes": {"pol": "llama"}}}})
    (settings,) = of(text, "ConfigMap")
    with pytest.raises(TailraceError, match="pol"):
        parse(ServeSettings, tomllib.loads(settings["data"]["serve.toml"]))
