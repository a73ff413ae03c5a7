"""tailrace plan."""

import pytest

TRAFFIC = ("--workload", "chat", "--rate", 20, "--requests", 300)


def test_table_and_json(run, run_json):
    asked = ("plan", *TRAFFIC, "-p", "lmetric", "-p", "round_robin", "--seeds", 1, "-j", 1)
    text = run(*asked).stdout
    assert "lmetric serves 20.0 requests/s of chat within attainment >= 0.99 with" in text
    data = run_json(*asked)
    assert [need["policy"] for need in data["needs"]] == ["lmetric", "round_robin"]
    assert f"with {data['needs'][0]['found']['counts'][0]} replicas" in text


def test_with_and_without_order(run, run_json, refuse):
    asked = ("plan", *TRAFFIC, "-p", "linear_es", "-p", "round_robin", "--order", "--seeds", 1)
    data = run_json(*asked, "-j", 1)
    names = ["linear_es", "linear_es+order:tuned", "round_robin"]
    assert [need["policy"] for need in data["needs"]] == names
    alone, ordered = (need["found"]["counts"][0] for need in data["needs"][:2])
    text = run(*asked, "-j", 1).stdout
    assert f"linear_es: {alone} replicas, with its order {ordered}." in text
    refused = refuse("plan", *TRAFFIC, "-p", "round_robin", "--order")
    assert "none of these policies has a tuned order, only: " in refused
    assert "linear_es" in refused


def test_kinds_with_prices(run_json):
    kinds = ("--kind", "a100-llama3-8b=3", "--kind", "a100-llama3-8b*0.5=1.2")
    data = run_json("plan", *TRAFFIC, *kinds, "-p", "lmetric", "--seeds", 1, "-j", 1)
    assert data["kinds"] == ["a100-llama3-8b", "a100-llama3-8b*0.5"]
    found = data["needs"][0]["found"]
    assert found["price"] == pytest.approx(3 * found["counts"][0] + 1.2 * found["counts"][1])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workload", "chat"], "plan needs --rate (requests/s)"),
        ([*TRAFFIC, "--kind", "a100-llama3-8b=cheap"], "cannot read --kind a100-llama3-8b=cheap"),
        ([*TRAFFIC, "--kind", "a100-llama3-8b=0"], "cannot read --kind"),
        ([*TRAFFIC, "--kind", "a101"], "unknown device 'a101'"),
        ([*TRAFFIC, "--kind", "a100-llama3-8b*0"], "speed"),
        ([*TRAFFIC, "--attainment", "2"], "must be a share"),
        (["--scenario", "replica-failure", "--rate", "9"], "leave them out"),
    ],
)
def test_mistakes(refuse, arguments, message):
    assert message in refuse("plan", *arguments)


def test_a_limit_for_first_tokens_is_what_requests_aim_at(run_json):
    asked = ("plan", *TRAFFIC, "-p", "lmetric", "--seeds", 1, "-j", 1, "--ttft-p99-s", 5)

    def attained(*more):
        return run_json(*asked, *more)["needs"][0]["found"]["summary"]["slo_attainment"]

    # Within 5 s all of them are, within a millisecond none.
    assert attained() > 0.9
    assert attained("--ttft-slo-s", 0.001) == 0.0
    told = [
        run_json(*asked, *more)["needs"][0]["found"]["target_s"]
        for more in ((), ("--ttft-slo-s", 2), ("--attainment", 0.5))
    ]
    assert told == [5.0, None, None]
