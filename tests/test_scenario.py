import pytest

from tailrace import scenario as scenarios
from tailrace.config import Cluster, Replica, RouterSettings, Scenario
from tailrace.errors import TailraceError

TRAINING_SET = {
    "uniform-chat-30", "uniform-chat-80", "uniform-chat-95", "mixed-speed", "hot-sessions",
    "hot-sessions-mixed-speed", "hot-sessions-overload", "bursty-code", "shared-prompts", "agents",
    "reasoning", "overload-recovery", "replica-failure", "stale-metrics", "scale-2", "scale-8",
    "scale-32",
}  # fmt: skip


def test_the_training_set_and_the_demo_are_shipped():
    assert TRAINING_SET | {"demo"} <= set(scenarios.names())


@pytest.mark.parametrize("name", scenarios.names())
def test_every_shipped_scenario_loads(name):
    scenario = scenarios.load(name)
    assert scenario.name == name
    assert scenario.description
    assert scenario.capacity_rps is not None


def test_unknown_scenarios_name_the_nearest():
    with pytest.raises(TailraceError, match=r"unknown scenario 'hot-session'; did you mean hot-se"):
        scenarios.load("hot-session")


def test_a_file_is_named_after_itself(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text("")
    assert scenarios.load(path) == Scenario(name="mine")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a = ", "not valid TOML"),
        ("[cluster]\nreplica = 3", "unknown setting 'cluster.replica'; did you mean cluster.repl"),
        ("[[events]]\nat_s = 1\nreplica = 4\nkind = 'die'", "names replica 4.*has only 4"),
        ("[workload]\nrequests = 0", "workload.requests: .*greater than or equal to 1, got 0"),
    ],
)
def test_bad_files(tmp_path, text, message):
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(TailraceError, match=message):
        scenarios.load(path)


def test_a_missing_file_is_said_in_a_sentence(tmp_path):
    with pytest.raises(TailraceError, match=r"cannot read .*No such file"):
        scenarios.load(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", "capacity_rps = 12.3457\n"),
        ("name = 'a' # kept\n", "name = 'a' # kept\ncapacity_rps = 12.3457\n"),
        (
            "# kept\ncapacity_rps = 1\n\n[workload]\nload = 0.5\n",
            "# kept\ncapacity_rps = 12.3457\n\n[workload]\nload = 0.5\n",
        ),
        ("name = 'a'\n\n[workload]\n", "name = 'a'\ncapacity_rps = 12.3457\n\n[workload]\n"),
        ("[workload]\nload = 0.5", "capacity_rps = 12.3457\n\n[workload]\nload = 0.5"),
    ],
)
def test_capacity_is_written_and_all_else_kept(tmp_path, before, after):
    path = tmp_path / "mine.toml"
    path.write_text(before)
    scenarios.write_capacity(path, 12.345678)
    assert path.read_text() == after
    assert scenarios.load(path).capacity_rps == 12.3457


def test_a_digest_changes_with_every_setting_but_not_with_unset_newer_ones():
    plain = Scenario()
    assert scenarios.digest(plain) == scenarios.digest(Scenario())
    changed = [
        plain.with_workload(rate=3.0),
        plain.with_workload(prompt_scale=2.0),
        plain.with_workload(session_ids=False),
        plain.model_copy(update={"router": RouterSettings(prefix_learns="first_token")}),
        plain.model_copy(update={"cluster": Cluster(replicas=(Replica(assumed_speed=2.0),))}),
    ]
    assert len({scenarios.digest(scenario) for scenario in (plain, *changed)}) == 6
