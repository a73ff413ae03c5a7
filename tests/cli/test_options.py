import click
import pytest
from click.testing import CliRunner

from tailrace.cli.options import SECTIONS, SectionedCommand, scenario_options, take_scenario
from tailrace.config import Scenario
from tailrace.errors import TailraceError


@click.command(cls=SectionedCommand)
@scenario_options
def show(**settings):
    """Show."""
    show.seen = take_scenario(settings)


def scenario(*args) -> Scenario:
    result = CliRunner().invoke(show, [str(a) for a in args], standalone_mode=False)
    if result.exception:
        raise result.exception
    return show.seen


@pytest.fixture
def file(tmp_path):
    def write(text):
        path = tmp_path / "scenario.toml"
        path.write_text(text)
        return path

    return write


def test_no_options_give_the_defaults():
    assert scenario() == Scenario()


def test_options_set_their_settings():
    s = scenario(
        "--replicas", 8, "--scheduler", "sarathi", "--workload", "chat-bursty", "--rate", 3
    )
    assert s.cluster.size == 8
    assert s.cluster.replicas[0].scheduler == "sarathi"
    assert s.workload.name == "chat-bursty"
    assert s.workload.rate == 3.0
    s = scenario("--no-prefix-caching", "--exact", "--staleness-s", 0)
    assert not s.cluster.replicas[0].prefix_caching
    assert s.engine.exact
    assert s.router.staleness_s == 0


def test_every_plain_setting_has_an_option_with_its_own_words():
    options = {p.name: p for p in show.params}
    assert len(options) == len(show.params)
    help_page = CliRunner().invoke(show, ["--help-all"]).output
    for title, key, model in SECTIONS:
        assert title in help_page
        for field, info in model.model_fields.items():
            if field == "cost":
                assert f"{key}__{field}" not in options
                continue
            option = options[f"{key}__{field}"]
            assert " ".join(info.description.split()) in option.help
    assert "[default: 4]" in options["replica__count"].help
    assert "[default: on]" in options["replica__prefix_caching"].help
    assert set(options["router__predictor"].type.choices) == {"mean", "exact", "bucket", "noisy"}


def test_options_win_over_the_file_and_the_file_over_the_scenario(file):
    path = file('[workload]\nname = "reasoning"\nrequests = 77\n')
    s = scenario("--scenario", "demo", "--config", path, "--requests", 5)
    assert s.name == "demo"
    assert s.workload.name == "reasoning"
    assert s.workload.requests == 5


def test_load_and_rate_overrule_each_other_by_layer(file):
    path = file("[workload]\nrate = 3.0\n")
    assert scenario("--config", path, "--load", 0.5).workload.rate is None
    assert scenario("--config", path, "--rate", 2).workload.rate == 2
    with pytest.raises(TailraceError, match="--rate and --load both"):
        scenario("--config", path, "--load", 0.5, "--rate", 2)
    other = file("[workload]\nload = 0.4\n")
    assert scenario("--config", other, "--rate", 9).workload.rate == 9


def test_a_file_of_requests_is_replayed_at_its_own_pace_unless_told():
    assert scenario("--workload", "requests.csv").workload.load is None
    assert scenario("--workload", "requests.csv", "--load", 0.5).workload.load == 0.5
    assert scenario("--workload", "chat").workload.load == 0.8


def test_options_of_replicas_apply_to_every_kind(file):
    path = file("[[cluster.replicas]]\nspeed = 2\n[[cluster.replicas]]\ncount = 3\n")
    s = scenario("--config", path, "--batch-cap", 16)
    assert [r.batch_cap for r in s.cluster.replicas] == [16, 16]
    assert s.cluster.size == 4
    with pytest.raises(TailraceError, match=r"ambiguous.*2 kinds"):
        scenario("--config", path, "--replicas", 8)


def test_set_reaches_anything(file):
    path = file("[[events]]\nat_s = 1\nreplica = 0\nkind = 'die'\n")
    s = scenario(
        *("--config", path, "--set", "cluster.replicas.0.speed=0.5", "--set", "events.0.at_s=7"),
        *("--set", "workload.name=doc-qa", "--set", "engine.exact=true", "--set", "name=x=y"),
        *("--set", "cluster.replicas.0.cost={base_ms = 5.0, per_token_ms = 0.1}"),
    )
    assert s.cluster.replicas[0].speed == 0.5
    assert s.cluster.replicas[0].cost.base_ms == 5.0
    assert s.events[0].at_s == 7
    assert s.workload.name == "doc-qa"
    assert s.engine.exact
    assert s.name == "x=y"
    s = scenario("--set", "cluster.replicas=[{count=2}, {speed=0.5}]")
    assert s.cluster.size == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("speed", "--set needs KEY=VALUE, got 'speed'"),
        ("=3", "--set needs KEY=VALUE"),
        ("worklod.requests=3", "unknown setting 'worklod'; did you mean workload"),
        (
            "workload.request=3",
            "unknown setting 'workload.request'; did you mean workload.requests",
        ),
        ("cluster.replicas.4.speed=1", "'4' must be a number below 1"),
        ("cluster.replicas.x.speed=1", "'x' must be a number below 1"),
        ("workload.rate=nan", "workload.rate: .*finite number"),
        ("workload=3", "workload"),
    ],
)
def test_bad_assignments(text, message):
    with pytest.raises(TailraceError, match=message):
        scenario("--set", text)


def test_a_stored_capacity_holds_only_for_its_cluster_and_traffic(file):
    path = file('capacity_rps = 12.5\n[workload]\nname = "chat"\n')
    assert scenario("--config", path).capacity_rps == 12.5
    assert scenario("--config", path, "--load", 0.5, "--requests", 3).capacity_rps == 12.5
    assert scenario("--config", path, "--staleness-s", 0).capacity_rps == 12.5
    assert scenario("--config", path, "--replicas", 8).capacity_rps is None
    assert scenario("--config", path, "--workload", "reasoning").capacity_rps is None
    again = ("--replicas", 8, "--set", "capacity_rps=25")
    assert scenario("--config", path, *again).capacity_rps == 25


def test_a_file_cannot_borrow_the_capacity_of_the_scenario_it_changes(file):
    first = file("capacity_rps = 12.5\n")
    other = first.with_name("other.toml")
    other.write_text("[[cluster.replicas]]\ncount = 2\n")
    assert scenario("--scenario", first, "--config", other).capacity_rps is None
