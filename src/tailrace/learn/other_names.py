"""What PPO schedulers for Vidur call their settings, and which settings of ours do the same.

The names are those of docs/from-vidur.md. Where value and meaning carry over, the name works as an
alias (``targets``); where they do not, the note says what to set instead.
"""

from typing import NamedTuple

#: Vidur's command line puts this before every setting of such a scheduler.
PREFIX = "p_p_o_global_scheduler_modular_config_"


class OtherName(NamedTuple):
    """A setting of another PPO scheduler."""

    targets: tuple[str, ...]  #: our settings that take its value; none: there is no alias
    note: str  #: how it differs


def _alias(*targets: str, note: str = "") -> OtherName:
    return OtherName(targets, note)


def _instead(note: str) -> OtherName:
    return OtherName((), note)


_ENTROPY = _alias(
    "exploration.entropy_start", "exploration.entropy_end", note="one value: it does not fade"
)
_HIDDEN = _alias("network.hidden", note="LayerNorm and GELU are always there")
_BALANCE = _alias(
    "reward.balance", note="per second, of the coefficient of variation of requests in flight"
)
_BOUND = _instead(
    "reward.bound upwards and reward.bound_low downwards (8 and 4 for [+8, -4]), with "
    "reward.hard_bound to cut instead of bend; there is none unless it is set"
)
_ABSOLUTE = _instead(
    "reward.e2e, reward.ttft, reward.late and reward.e2e_late, the weights of the latencies"
)
_DERIVED = _instead("nothing: sizes follow from the features and the cluster")
_QUEUE = _instead(
    "nothing: a replica's queue is shown by its length, tokens and waiting times, whatever its "
    "size (`tailrace features`)"
)
_VALUE = _alias("ppo.value_weight")
_PER_DECISION = "needs ppo.discount_by = 'decision'; the default is a half-life in seconds"

OTHER_NAMES: dict[str, OtherName] = {
    # exploration
    "entropy_coef": _ENTROPY,
    "c_2": _ENTROPY,
    "entropy_schedule": _instead(
        "exploration.entropy_points, pairs of update and weight, or exploration.entropy_start, "
        "exploration.entropy_end and exploration.entropy_updates"
    ),
    "entropy_min": _instead(
        "exploration.entropy_floor, as a share of the entropy of a uniform choice: 0.5 nats on 4 "
        "replicas are 0.36"
    ),
    "enable_dynamic_temperature": _instead(
        "exploration.temperature_entropy, the entropy to hold; exploration.temperature_points for "
        "a schedule; exploration.pulse_factor above 1 for pulses"
    ),
    "temperature": _alias("exploration.temperature_start"),
    "pulse_interval": _alias(
        "exploration.pulse_interval", note="counted in updates; needs pulse_factor"
    ),
    "pulse_magnitude": _alias("exploration.pulse_factor"),
    "stagnation_threshold": _alias(
        "exploration.pulse_min_improvement", note="a share of the score"
    ),
    "stagnation_memory": _alias("exploration.pulse_patience", note="counted in evaluations"),
    "epsilon": _alias("exploration.epsilon_start", note="fades over epsilon_updates"),
    # PPO
    "clip_ratio": _alias("ppo.clip_range"),
    "value_coef": _VALUE,
    "c_1": _VALUE,
    "max_grad_norm": _alias("ppo.max_grad_norm"),
    "epochs": _alias("ppo.epochs"),
    "target_kl": _alias(
        "ppo.target_kl", note="say what it does: kl_stop, kl_penalty or kl_learning_rate"
    ),
    "use_kl_regularization": _alias("ppo.kl_penalty", note="needs target_kl"),
    "kl_coef": _instead(
        "ppo.kl_penalty with ppo.target_kl: the weight adapts; for the divergence from the warm "
        "start it is ppo.start_kl_weight, which fades over ppo.start_kl_updates"
    ),
    "gamma": _alias("ppo.gamma", note=_PER_DECISION),
    "gae_lambda": _alias("ppo.gae_lambda", note=_PER_DECISION),
    "rollout_len": _alias("ppo.decisions", note="of each cluster"),
    "n_envs": _alias("ppo.clusters"),
    "learning_rate": _alias("ppo.learning_rate"),
    # reward
    "latency_threshold": _alias(
        "reward.e2e_target_s", note="s; the target for first tokens is the scenario's"
    ),
    "latency_penalty_scale": _alias("reward.e2e_late", note="cost of a second past the target"),
    "latency_penalty_slope": _instead("reward.soft_scale, as a multiple of the target"),
    "load_balance_penalty": _BALANCE,
    "balance_penalty_weight": _BALANCE,
    "throughput_target": _instead(
        "nothing: it follows the measured arrival rate; reward.throughput weights what is missing"
    ),
    "absolute_weight": _ABSOLUTE,
    "w_abs": _ABSOLUTE,
    "delta_weight": _alias("reward.improvement"),
    "w_delta": _alias("reward.improvement"),
    "alpha": _instead("reward.throughput against reward.e2e and reward.ttft"),
    "kappa": _alias("reward.e2e_soft_late", note="weight of the logistic penalty"),
    "sigma": _instead("reward.soft_scale, as a multiple of the target: 2 s of 6 s are 0.33"),
    "clip_range": _BOUND,
    "reward_clipping": _BOUND,
    "scale_factor": _instead("ppo.scale_rewards, which divides by the deviation of returns"),
    # network and observation
    "enable_decoupled_ac": _alias("network.decoupled_critic"),
    "share_encoder": _instead("network.decoupled_critic, which is its opposite"),
    "feature_projection_dim": _HIDDEN,
    "hidden_size": _HIDDEN,
    "embed_dim": _HIDDEN,
    "critic_hidden_size": _alias("network.value_hidden"),
    "critic_layers": _instead("nothing: the value has one hidden layer, network.value_hidden wide"),
    "num_layers": _instead("network.memory: units of one GRU layer; 0 is none"),
    "state_dim": _DERIVED,
    "action_dim": _DERIVED,
    "max_queue_requests_per_replica": _QUEUE,
    "max_queue_requests": _QUEUE,
    # the world
    "num_replicas": _instead("cluster.replicas.0.count of the scenario"),
    "qps": _instead("workload.rate of the scenario"),
}


def find(key: str) -> OtherName | None:
    """Return the entry of a setting's path by its last part, if it is such a name."""
    return OTHER_NAMES.get(key.rpartition(".")[2].removeprefix(PREFIX))
