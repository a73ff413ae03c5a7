"""The Gymnasium environments: interface, episodes, determinism, and what they must refuse."""

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

import tailrace.env
from tailrace.config import Cluster, Event, Replica, RouterSettings, Scenario, Workload
from tailrace.env.single_env import RouterEnv
from tailrace.env.vector_env import RouterVectorEnv
from tailrace.errors import TailraceError
from tailrace.policy.learned.observation import N_REPLICA_FEATURES, N_REQUEST_FEATURES
from tailrace.seeds import Purpose, generator, purpose_of, seeds
from tailrace.sim.simulator import Simulation
from tailrace.view.ordering import Order

pytestmark = pytest.mark.compiled


def scenario(n: int = 3, workload: str = "chat", **settings) -> Scenario:  # type: ignore[no-untyped-def]
    kind = Replica(count=n, num_blocks=3000)
    return Scenario(
        name=f"{workload}-{n}",
        cluster=Cluster(replicas=(kind,)),
        workload=Workload(name=workload, rate=7.0 * n),
        **settings,
    )


CHAT = scenario()
SESSIONS = scenario(2, "sessions-hot")


def random_world(seed: int) -> Scenario:
    """A cluster of random size and speeds; sometimes a replica dies."""
    rng = generator(seed, "world")
    n = int(rng.integers(1, 5))
    replicas = tuple(Replica(speed=float(rng.uniform(0.5, 2)), num_blocks=3000) for _ in range(n))
    dies = Event(at_s=1.0, replica=0, kind="die")
    returns = Event(at_s=2.0, replica=0, kind="return")
    return Scenario(
        cluster=Cluster(replicas=replicas),
        workload=Workload(name=str(rng.choice(["chat", "sessions-hot"])), rate=6.0 * n),
        router=RouterSettings(staleness_s=float(rng.uniform(0.05, 2))),
        events=(dies, returns) if rng.random() < 0.5 else (),
    )


def run(env: RouterVectorEnv, steps: int, seed: int = 1) -> list[NDArray[np.float64]]:
    """Rewards and observations of random actions, in one flat list."""
    rng = np.random.default_rng(seed)
    observation, _ = env.reset(seed=seed)
    out = [*observation.values()]
    for _ in range(steps):
        actions = rng.integers(env.core.replicas, size=env.num_envs)
        observation, rewards, terminated, truncated, info = env.step(actions)
        assert not terminated.any()
        assert env.observation_space.contains(observation)
        out += [*observation.values(), rewards, truncated, info["elapsed_s"]]
    return out


# ---- one cluster --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [tailrace.env.ENV_ID, tailrace.env.VECTOR_ENV_ID])
@pytest.mark.parametrize("worlds", [CHAT, SESSIONS], ids=["chat", "sessions"])
def test_passes_the_checker(name, worlds) -> None:
    env = gymnasium.make(name, worlds=worlds, decisions=30)
    check_env(env.unwrapped)


def test_an_episode_ends_by_truncation_and_needs_a_reset() -> None:
    env = RouterEnv(CHAT, decisions=5)
    with pytest.raises(TailraceError, match=r"reset\(\)"):
        env.step(0)
    env.reset(seed=3)
    ends = [env.step(0)[2:4] for _ in range(5)]
    assert ends == [(False, False)] * 4 + [(False, True)]
    with pytest.raises(TailraceError, match=r"reset\(\)"):
        env.step(0)


def test_shapes_follow_from_the_schema_and_the_cluster() -> None:
    env = RouterEnv([CHAT, SESSIONS], decisions=5, max_replicas=7)
    observation, _ = env.reset(seed=1)
    assert observation["replicas"].shape == (7, N_REPLICA_FEATURES)
    assert observation["request"].shape == (N_REQUEST_FEATURES,)
    assert observation["mask"].sum() == env.core.playing[0].scenario.cluster.size
    assert not observation["replicas"][observation["mask"] == 0].any()


def test_observations_and_costs_are_those_of_the_simulator() -> None:
    """Step by step beside a Simulation of the same scenario and seed."""
    seed = seeds(Purpose.TRAINING, 1, 77)[0]
    env = RouterEnv(SESSIONS, decisions=60)
    env.reset(options={"episode_seed": seed})
    episode = env.core.playing[0]
    simulation = Simulation(SESSIONS.cluster, episode.table, seed=seed)
    total = 0.0
    for k in range(60):
        view = simulation.next_decision()
        assert view is not None
        simulation.assign(k % 2)
        _, reward, _, _, info = env.step(k % 2)
        total += info["cost_s"]
        assert reward == pytest.approx(-info["cost_s"])
    simulation.next_decision()
    rows, now = simulation.result().requests, simulation.now
    arrived = rows["arrived_s"] <= now
    first = np.fmin(rows["first_token_s"], now)[arrived] - rows["arrived_s"][arrived]
    done = np.fmin(rows["finished_s"], now)[arrived] - rows["arrived_s"][arrived]
    expected = 0.2 * done + first + 2 * np.maximum(first - 1.0, 0)
    assert total == pytest.approx(expected.sum(), rel=1e-9)


# ---- many clusters ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [tailrace.env.ENV_ID, tailrace.env.VECTOR_ENV_ID])
def test_is_registered_as_a_vector_environment_with_the_same_spaces(name) -> None:
    env = gymnasium.make_vec(name, num_envs=3, worlds=CHAT, decisions=8)
    assert isinstance(env, RouterVectorEnv)
    assert env.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
    single = gymnasium.make(name, worlds=CHAT, decisions=8)
    assert env.single_observation_space == single.observation_space
    assert env.single_action_space == single.action_space
    observation, _ = env.reset(seed=1)
    assert env.observation_space.contains(observation)
    env.close()


@pytest.mark.parametrize("worlds", [CHAT, [CHAT, SESSIONS], random_world])
def test_same_seed_same_run_and_another_seed_not(worlds) -> None:
    runs = [run(RouterVectorEnv(4, worlds, decisions=25), 60, seed) for seed in (1, 1, 2)]
    assert all((a == b).all() for a, b in zip(runs[0], runs[1], strict=True))
    assert any((a != b).any() for a, b in zip(runs[0], runs[2], strict=True))


def test_the_next_episode_begins_in_the_same_step() -> None:
    env = RouterVectorEnv(3, SESSIONS, decisions=10)
    env.reset(seed=4)
    first = list(env.core.playing)
    for k in range(1, 11):
        observation, rewards, _, truncated, info = env.step(np.zeros(3, np.int64))
        if k < 10:
            assert "final_obs" not in info
            assert not truncated.any()
    assert truncated.all()
    assert info["_final_obs"].all()
    assert (info["final_info"]["episode"]["l"] == 10).all()
    assert env.observation_space.contains(info["final_obs"])
    # The new clusters are empty, the old ones were not.
    assert not observation["replicas"][:, :, 0].any()
    assert info["final_obs"]["replicas"][:, 0, 1].all()
    assert all(a is not b for a, b in zip(first, env.core.playing, strict=True))
    assert {purpose_of(e.seed) for e in env.core.playing} == {Purpose.TRAINING}
    _, rewards, *_ = env.step(np.zeros(3, np.int64))
    assert (rewards <= 0).all()


def test_a_restarted_cluster_plays_like_a_new_one() -> None:
    """Nothing of the episode before is left behind, with caches, sessions and failures."""
    chosen = seeds(Purpose.TRAINING, 3, 500)

    def play(env: RouterVectorEnv) -> list[NDArray[np.float64]]:
        out = [v.copy() for v in env.core.observation().values()]
        for k in range(40):
            observation, rewards, *_ = env.step(np.full(3, k % 4))
            out += [*observation.values(), rewards]
        return out

    fresh = RouterVectorEnv(3, random_world, decisions=1000)
    fresh.reset(options={"episode_seeds": chosen})
    used = RouterVectorEnv(3, random_world, decisions=1000)
    run(used, 300)
    used.core.restart(np.arange(3), chosen)
    assert all((a == b).all() for a, b in zip(play(fresh), play(used), strict=True))


def test_clusters_of_a_group_get_the_same_requests() -> None:
    env = RouterVectorEnv(6, random_world, decisions=12, group=3)
    env.reset(seed=5)
    for _ in range(2):
        for k in (0, 3):
            assert env.core.playing[k] is env.core.playing[k + 1] is env.core.playing[k + 2]
        assert env.core.playing[0].seed != env.core.playing[3].seed
        for _ in range(12):
            observation, *_ = env.step(np.arange(6) % env.core.replicas)
    request = observation["request"][:, :2]  # prompt and predicted output at time 0
    assert (request[0] == request[1]).all()
    assert (request[3] == request[5]).all()


def test_an_action_that_cannot_be_taken_goes_to_the_next_replica() -> None:
    dies = Event(at_s=0.0, replica=1, kind="drain")
    env = RouterVectorEnv(1, scenario(3, events=(dies,)), decisions=30, max_replicas=5)
    env.reset(seed=1)
    assert env.core.step_out.mask[0].tolist() == [True, False, True, False, False]
    taken = [int(env.core.valid(np.array([a]))[0]) for a in range(5)]
    assert taken == [0, 2, 2, 0, 0]


def test_without_copies_the_arrays_are_reused() -> None:
    for copy in (True, False):
        env = RouterVectorEnv(2, CHAT, decisions=50, copy=copy)
        before, _ = env.reset(seed=1)
        after, *_ = env.step(np.zeros(2, np.int64))
        assert (before["replicas"] is after["replicas"]) == (not copy)


def test_requests_that_nobody_can_serve_end_the_episode() -> None:
    events = tuple(Event(at_s=1.0, replica=r, kind="die") for r in range(3))
    env = RouterEnv(scenario(3, events=events), decisions=500)
    env.reset(seed=1)
    for _ in range(500):
        *_, truncated, _ = env.step(0)
        if truncated:
            break
    assert env.core.decisions[0] < 100


# ---- what is refused ----------------------------------------------------------------------------


def test_with_an_order_short_prompts_go_first() -> None:
    busy = Scenario(
        name="busy",
        cluster=Cluster(replicas=(Replica(count=2, batch_cap=4),)),
        workload=Workload(name="code-completion", rate=30.0),
    )

    def first_tokens(order: Order | None) -> NDArray[np.float64]:
        """Play one episode; return the times to first token of a short half and a long half, s."""
        env = RouterEnv(busy, decisions=200, order=order)
        env.reset(seed=3)
        for k in range(199):
            env.step(k % 2)
        fleet = env.core.fleet
        assert (fleet.servers[0]["ordered"] == (order is not None)).all()
        requests, facts = fleet.requests[0, :200], env.core._tables.facts[0, :200]
        ttft = requests["first"] - requests["arrived"]
        is_short = facts["prompt"] <= np.median(facts["prompt"])
        return np.array([np.nanmean(ttft[is_short]), np.isnan(ttft[~is_short]).mean()])

    plain, none, ordered = first_tokens(None), first_tokens(Order(w=0)), first_tokens(Order(w=40))
    np.testing.assert_array_equal(plain, none)  # by arrival, as without priorities
    assert ordered[0] < 0.7 * plain[0]
    assert ordered[1] > plain[1]


def test_evaluation_seeds_are_refused() -> None:
    bad = seeds(Purpose.EVALUATION, 1)[0]
    with pytest.raises(TailraceError, match="set aside for evaluation"):
        RouterEnv(CHAT, decisions=5).reset(seed=bad)
    with pytest.raises(TailraceError, match="set aside for evaluation"):
        RouterVectorEnv(1, CHAT, decisions=5).reset(options={"episode_seeds": [bad]})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"decisions": 0}, "at least one decision"),
        ({"group": 2}, "groups of 2"),
        ({"max_replicas": 2}, "max_replicas = 2"),
        ({"worlds": []}, "at least one scenario"),
        ({"worlds": "nowhere"}, "nowhere"),
        ({"worlds": Scenario(cluster=Cluster(replicas=(Replica(scheduler="orca"),)))}, "orca"),
        ({"reward": {"relative": 1.0, "reference": "lookahead"}}, "built-in rule"),
    ],
)
def test_contradictory_settings(arguments, message) -> None:
    with pytest.raises(TailraceError, match=message):
        RouterVectorEnv(3, **{"worlds": CHAT, "decisions": 5, **arguments})


def test_bad_actions() -> None:
    env = RouterVectorEnv(2, CHAT, decisions=5)
    with pytest.raises(TailraceError, match=r"reset\(\)"):
        env.step(np.zeros(2, np.int64))
    env.reset(seed=1)
    for actions in ([0, 3], [-1, 0]):
        with pytest.raises(TailraceError, match="from 0 to 2"):
            env.step(np.array(actions))
    with pytest.raises(TailraceError, match="expected 2 actions"):
        env.step(np.zeros(3, np.int64))
    with pytest.raises(TailraceError, match="1 seeds were given for 2 groups"):
        env.reset(options={"episode_seeds": [1_000_000_000]})


def test_a_sampler_may_grow_but_not_beyond_its_room() -> None:
    first = seeds(Purpose.TRAINING, 1)[0]

    def growing(seed: int) -> Scenario:
        return CHAT if seed < first + 100 else scenario(5)

    env = RouterVectorEnv(2, growing, decisions=5)
    with pytest.raises(TailraceError, match="set max_replicas"):
        env.reset(seed=1)
    env = RouterVectorEnv(2, growing, decisions=5, max_replicas=5)
    env.reset(seed=1)

    def caching(seed: int) -> Scenario:
        few = seed < first + 100
        kind = Replica(num_blocks=3000 if few else 30_000)
        return Scenario(cluster=Cluster(replicas=(kind,)), workload=Workload(rate=2.0))

    env = RouterVectorEnv(1, caching, decisions=5)
    env.reset(options={"episode_seeds": [first]})
    with pytest.raises(TailraceError, match="room for 30000 blocks"):
        env.core.restart(np.arange(1), [first + 200])


def test_more_content_than_foreseen_finds_room() -> None:
    """Arrays grow in the middle of the others' episodes without any effect on them."""
    first = seeds(Purpose.TRAINING, 1)[0]

    def worlds(seed: int) -> Scenario:
        return scenario(2, "chat" if seed < first + 100 else "sessions-hot")

    runs = []
    for later in (first + 5, first + 200):
        env = RouterVectorEnv(2, worlds, decisions=60)
        env.reset(options={"episode_seeds": [first, first + 1]})
        room = env.core.allocation
        seen = []
        for k in range(40):
            if k == 20:
                env.core.restart(np.array([1]), [later])
            observation, rewards, *_ = env.step(np.full(2, k % 2))
            seen.append(np.append(observation["replicas"][0].ravel(), rewards[0]))
        runs.append(np.array(seen))
    assert env.core.allocation != room
    assert (runs[0] == runs[1]).all()
