import importlib.util
from pathlib import Path

import pytest

from tailrace import config
from tailrace.errors import RenamedSettingWarning, TailraceError
from tailrace.learn import settings as s
from tailrace.learn.settings import TrainSettings
from tailrace.seeds import SEEDS_PER_PURPOSE

DOCS = Path(__file__).parents[2] / "docs"
STAGE = {"name": "a", "updates": 1}


def build(**over) -> TrainSettings:
    return s.build({"scenarios": ["demo"]}, over)


def demonstrations(**over):
    return {"demonstrations": over}


def randomise(**over):
    return {"scenarios": [], "randomise": over}


PPO = {"advantage": "gae", "objective": "clipped"}
LIVE = PPO | {"env": "live", "serve": "router.toml"}


@pytest.mark.parametrize(
    ("over", "message"),
    [
        ({"scenarios": []}, "nothing to train on: give scenarios, or randomise"),
        ({"randomise": {}}, "share = 1 leaves none of them"),
        (randomise(share=0.5), "no scenarios are given for the rest"),
        ({"updates": 0, "demonstrations": {"rounds": 0}}, "there is nothing to do"),
        ({"updates": 100_000}, r"would play 2000060 worlds.*set fewer worlds"),
        (PPO | {"updates": 20_000}, "would play 1320060 worlds"),
        ({"seed": 900}, "seed: .*less than 900"),
        ({"reward": {"e2e": 1.0}}, "reward of another kind needs advantage = 'gae' or"),
        ({"exploration": {"epsilon_start": 0.1}}, "epsilon needs advantage = 'gae' or 'grouped'"),
        ({"branching": {"min_horizon_s": 9, "max_horizon_s": 8}}, "min_horizon_s is above"),
        (
            {"branching": {"imitation_weight": 1.0}} | demonstrations(rounds=0),
            "rounds = 0 makes none",
        ),
        (
            PPO | {"ppo": {"imitation_weight": 1.0}} | demonstrations(rounds=0),
            "ppo.imitation_weight mixes demonstrations in",
        ),
        ({"curriculum": [STAGE | {"scenarios": ["mixed-speed"]}]}, "a names 'mixed-speed'"),
        ({"curriculum": [{"name": "a"}, STAGE]}, "stage a never ends, but others follow"),
        ({"curriculum": [STAGE | {"late_weight": 3.0}]}, "stages that change the reward"),
        ({"curriculum": [STAGE | {"load": 0}]}, "curriculum.0.load: .*greater than 0"),
        (demonstrations(teachers={"lookahed": 1}), "unknown teacher 'lookahed'; did you mean look"),
        (demonstrations(teachers={}), "demonstrations.teachers: .*at least 1"),
        (demonstrations(teachers={"random": -1}), "share of teacher random must not be negative"),
        (demonstrations(teachers={"random": 0}), "all teachers have share 0"),
        (demonstrations(best_teacher=True), "best_teacher needs several"),
        (demonstrations(teachers={"start": 1}), "but start names none"),
        ({"start": "tailrace"} | demonstrations(rounds=1), "make `start` one of the teachers"),
        (demonstrations(load_factors=[2, 1]), "load_factors must rise"),
        (demonstrations(epsilon=1.5), "demonstrations.epsilon: .*less than or equal to 1"),
        ({"evaluation": {"baselines": []}}, "at least one rule to compare with"),
        (
            {"evaluation": {"baselines": ["lmetrics"]}},
            "unknown rule 'lmetrics'; did you mean lmetric",
        ),
        ({"branching": {"candidates": 1}}, "branching.candidates: .*greater than or equal to 2"),
        ({"branching": {"kl_limt": 1}}, "unknown setting 'branching.kl_limt'; did you mean bran"),
        ({"update": 3}, "unknown setting 'update'; did you mean updates"),
        ({"network": {"prior": "lmetrik"}}, "unknown rule for a prior 'lmetrik'"),
        ({"network": {"heads": 3}}, "no multiple of heads"),
        (PPO | {"ppo": {"minibatch": 10**6}}, "minibatch = 1000000 is more than"),
        (PPO | {"ppo": {"target_kl": 0.1}}, "target_kl does nothing by itself"),
        (PPO | {"exploration": {"pulse_patience": 2}}, "set pulse_factor above 1"),
        ({"method": "dqn"}, "method is now `advantage`"),
        ({"method": "ppo", **PPO}, "leave method out"),
        ({"advantage": "grouped", "ppo": {"group_size": 1}}, "set ppo.group_size to 2 or more"),
        (
            {"advantage": "grouped", "ppo": {"clusters": 10}},
            "ppo.group_size = 4 does not divide ppo.clusters = 10",
        ),
        (
            {"env": "vidur"},
            "env = 'vidur' needs advantage = 'gae' or 'grouped': only the simulator",
        ),
        ({"serve": "router.toml"}, "settings of a live router, but env = 'sim'"),
        (PPO | {"env": "live"}, "env = 'live' needs serve: the settings of the router"),
        (
            LIVE | {"advantage": "grouped"},
            "env = 'live' has one cluster.*needs advantage = 'gae'",
        ),
        (LIVE | {"curriculum": [STAGE]}, "env = 'live' takes requests as they come"),
        (
            LIVE | {"reward": {"relative": 0.5, "reference": "random"}},
            "only the simulator can do: env = 'live' needs reference = 'past'",
        ),
        (PPO | {"env": "vidur", **randomise()}, "env = 'vidur' plays scenarios"),
        (randomise(replicas=[4, 2]), r"replicas = \[4, 2\] must be two rising"),
        (randomise(replicas=[1, 4]), "fewer than 2 replicas"),
        (randomise(replicas=[2, 5000]), "randomise.replicas.1: .*1024"),
        (randomise(load=[0.5, 0.4]), "must be two rising"),
        (randomise(load=[0.5, float("inf")]), "randomise.load.1"),
        (randomise(load_scale={"chat": 0}), "randomise.load_scale.chat: .*greater than 0"),
        (randomise(load_scale={"chatt": 1}), "unknown workload 'chatt'; did you mean chat"),
        (randomise(workloads={"chatt": 1}), "unknown workload 'chatt'; did you mean chat"),
        (randomise(workloads={"chat": -1}), "weight of workload chat must not be negative"),
        (randomise(workloads={"chat": 0}), "all workloads have weight 0"),
        (randomise(staleness_s=[]), "at least one entry"),
        (randomise(staleness_s=[1e-5]), "must be 0 or at least 0.001"),
        (randomise(staleness_s=[-1]), "randomise.staleness_s.0: .*greater than or equal to 0"),
        (randomise(predictors=["clairvoyant"]), "randomise.predictors.0"),
    ],
    ids=str,
)
def test_contradictions_and_mistakes_are_told_in_one_sentence(over, message):
    with pytest.raises(TailraceError, match=message):
        build(**over)


def test_the_last_stage_and_stages_with_a_score_need_no_number_of_updates():
    stages = [{"name": "a", "until_score": 0.9}, {"name": "b"}]
    assert [stage.name for stage in build(curriculum=stages).curriculum] == ["a", "b"]


@pytest.mark.parametrize(
    ("given", "advantage", "objective"),
    [
        ({"method": "branching"}, "branching", "kl_limited"),
        ({"method": "ppo"}, "gae", "clipped"),
        ({"method": "ppo", "ppo": {"group_size": 4}}, "grouped", "clipped"),
    ],
)
def test_method_goes_on_working_with_a_warning(given, advantage, objective):
    with pytest.warns(RenamedSettingWarning, match="^setting method is now advantage and"):
        found = s.build({"scenarios": ["uniform-chat-80"], **given})
    assert (found.advantage, found.objective) == (advantage, objective)
    assert found.group == (4 if advantage == "grouped" else 1)


def test_presets_are_sound_and_named():
    assert s.preset_names() == [
        "finetune", "full", "polish", "ppo", "ppo-scratch", "ppo-vidur", "quick", "recorded",
        "tail", "wide",
    ]  # fmt: skip
    for name in s.preset_names():
        own = (
            {"start": "tailrace"}
            if name in ("finetune", "polish", "recorded", "tail", "wide")
            else {}
        )
        if name == "finetune":
            own["scenarios"] = ["demo"]
        preset = s.build(s.read(name), own)
        assert preset.name == name
        assert preset.steps >= 6
    assert len(s.build(s.read("quick")).scenarios) == 5
    with pytest.raises(TailraceError, match="unknown preset 'quik'; did you mean quick"):
        s.read("quik")


def test_files_are_read_like_presets(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('scenarios = ["demo"]\nupdates = 3\n')
    data = s.read(str(path))
    assert s.build(data, {"updates": 4}).updates == 4
    assert s.build(data).name == "mine"
    path.write_text("updates = ")
    with pytest.raises(TailraceError, match="is not valid TOML"):
        s.read(str(path))
    with pytest.raises(TailraceError, match="cannot read"):
        s.read(str(tmp_path / "none.toml"))


def test_former_names_and_new_ones_may_be_put_over_each_other():
    with pytest.warns(RenamedSettingWarning, match="trace is now called gae_lambda"):
        above = s.build({**PPO, "scenarios": ["demo"], "ppo": {"gae_lambda": 0.5}},
                        {"ppo": {"trace": 0.25}})  # fmt: skip
    assert above.ppo.gae_lambda == 0.25
    data = {"ppo": {"gae_lambda": 0.5}}
    with pytest.warns(RenamedSettingWarning):
        s.assign(data, "ppo.trace", 0.125)
    assert data == {"ppo": {"gae_lambda": 0.125}}


def test_runs_and_validation_share_no_seeds():
    last = s.training_seed(s.MAX_RUNS - 1, s.SEEDS_PER_RUN - 1)
    assert s.training_seed(3, 0) - s.training_seed(2, 0) == s.SEEDS_PER_RUN
    assert last < s.FIRST_VALIDATION_SEED < SEEDS_PER_PURPOSE
    with pytest.raises(TailraceError, match="fewer worlds or updates"):
        s.training_seed(0, s.SEEDS_PER_RUN)


def test_settings_survive_json_even_infinite_ones():
    given = build(branching={"logit_margin": float("inf")}, curriculum=[STAGE])
    assert config.parse(TrainSettings, given.model_dump(mode="json")) == given


@pytest.mark.parametrize(
    ("guide", "names"),
    [
        (
            "training-settings.md",
            ("kl_limit", "until_score", "staleness_s", "entropy_floor", "soft_late"),
        ),
        ("router-settings.md", ("guard_ratio", "canary_share", "slow_start_s", "token_env")),
    ],
)
def test_the_guides_name_every_setting(guide, names):
    """If not: python docs/settings_table.py."""
    spec = importlib.util.spec_from_file_location("settings_table", DOCS / "settings_table.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    text = (DOCS / guide).read_text(encoding="utf-8")
    assert script.with_tables(text, script.GUIDES[guide]) == text
    for name in names:
        assert f"| `{name}` |" in text
