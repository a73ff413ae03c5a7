"""Settings of the improvement loop; no torch in here, so that the command line reads them fast."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from tailrace.config import Positive, Settings, Share

Weight = Annotated[float, Field(ge=0, le=1000, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
LearningRate = Positive
Objective = Literal["clipped", "kl_limited"]


#: Former names of settings of the learner.
RENAMED = {
    "schedule": "learning_rate_schedule",
    "clip": "clip_range",
    "gradient_clip": "max_grad_norm",
    "start_kl": "start_kl_weight",
    "imitation": "imitation_weight",
}


class LearningSettings(Settings):
    """How the policy learns from decisions and their advantages, wherever those come from."""

    SECTION: ClassVar[str]  #: name of the table of settings, for messages

    epochs: Count = 4
    """Passes over the decisions per update."""
    minibatch: Count = 2048
    """Decisions per gradient step."""
    learning_rate: LearningRate = 3e-4
    """Step size of Adam. The KL-limited objective uses a new optimiser in every update."""
    learning_rate_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate goes to `final_learning_rate` over the updates of a run."""
    final_learning_rate: LearningRate = 1e-5
    """Learning rate of the last update, unless the schedule is constant."""
    clip_range: float = Field(default=0.2, gt=0, lt=1)
    """Clipped objective: how far the probability of a choice may move per update, as a share."""
    kl_limit: Positive = 0.03
    """KL-limited objective: mean KL divergence of the target from the policy, nats."""
    max_grad_norm: Positive = 0.5
    """Largest norm of a gradient."""
    target_kl: Positive | None = None
    """KL divergence that an update should have or must not exceed, nats."""
    kl_stop: bool = False
    """End an update early when its divergence exceeds one and a half times the target."""
    kl_penalty: bool = False
    """Add a penalty on the divergence whose weight adapts to the target."""
    kl_learning_rate: bool = False
    """Adapt the learning rate so that the divergence meets the target."""
    start_kl_weight: Weight = 0.0
    """Weight of the divergence from the warm-start policy at the first update."""
    start_kl_updates: Count = 100
    """Updates over which that weight fades to nothing."""
    imitation_weight: Weight = 0.0
    """Weight of the imitation loss on demonstrations at the first update."""
    imitation_updates: Count = 100
    """Updates over which that weight fades to nothing."""
    imitation_batch_size: Count | None = 256
    """Demonstrations per gradient step; none: as many as `minibatch`."""

    @model_validator(mode="after")
    def _one_control(self) -> Self:
        uses = [n for n in ("kl_stop", "kl_penalty", "kl_learning_rate") if getattr(self, n)]
        if uses and self.target_kl is None:
            raise ValueError(f"{uses[0]} needs target_kl; set it, for example to 0.02")
        if self.target_kl is not None and not uses:
            raise ValueError(
                "target_kl does nothing by itself: set kl_stop, kl_penalty or kl_learning_rate"
            )
        if self.kl_penalty and self.kl_learning_rate:
            raise ValueError(
                "kl_penalty and kl_learning_rate would both steer the divergence; choose one"
            )
        if self.kl_learning_rate and self.learning_rate_schedule != "constant":
            raise ValueError(
                "kl_learning_rate adapts the learning rate: it goes with "
                "learning_rate_schedule = 'constant' only"
            )
        return self


class PpoSettings(LearningSettings):
    """Rollouts with the policy's own random choices (advantage = gae or grouped)."""

    SECTION: ClassVar = "ppo"
    RENAMED: ClassVar = {
        "half_life_s": "discount_half_life_s",
        "trace_s": "gae_lambda_half_life_s",
        "trace": "gae_lambda",
        "imitation_rows": "imitation_batch_size",
        **RENAMED,
        "group": "group_size",
        "advantages": "advantage_normalisation",
        "discount": "discount_by",
    }

    clusters: Count = 64
    """Clusters that are played per update, over all rollout tasks."""
    group_size: Count = 4
    """Clusters that play the same requests and are compared with each other at every decision
    (advantage = grouped)."""
    decisions: Count = 256
    """Decisions recorded per cluster and update."""
    warmup: int = Field(default=128, ge=0)
    """Decisions played before them, to fill the queues."""
    greedy_warmup: bool = False
    """Take the best choice in those, as the trained policy will, instead of drawing: rollouts then
    begin in states it gets into, the same for all clusters of a group."""
    unbalanced: Share = 0.0
    """Share of the groups that begin with most requests at one replica, or with none at one: the
    policy learns to spread load that is not spread. In the simulator only."""
    chunk: Count = 32
    """Decisions in a row that a network with memory is trained on at once."""
    value_weight: Weight = 0.5
    """Weight of the value's loss."""
    value_clip: Positive | None = None
    """How far a normalised value may move per update; none: freely."""
    advantage_normalisation: Literal["batch", "group", "raw"] = "batch"
    """Advantages get mean 0 and deviation 1 over the whole update, or each group of clusters by
    itself, or are taken as they are."""
    scale_rewards: bool = False
    """Divide rewards by the running deviation of discounted returns. Advantages and returns are
    normalised anyway, unless `advantage_normalisation` is raw."""
    discount_by: Literal["time", "decision"] = "time"
    """Whether discount and GAE lambda are per second of simulated time, given as half-lives, or
    per decision, given as factors."""
    discount_half_life_s: Positive = 30.0
    """Time after which a cost counts half (discount_by = time)."""
    gae_lambda_half_life_s: Positive = 15.0
    """GAE lambda as a half-life, s: how far into the future observed rewards are trusted over the
    value estimate (discount_by = time)."""
    gamma: float = Field(default=0.99, gt=0, lt=1)
    """Discount factor per decision (discount_by = decision)."""
    gae_lambda: float = Field(default=0.95, ge=0, le=1)
    """GAE lambda per decision (discount_by = decision)."""
    norm_updates: int = Field(default=0, ge=0)
    """Updates after which the normaliser of observations is frozen; it moves the policy a little
    behind the back of clipping and KL control."""

    @model_validator(mode="after")
    def _possible(self) -> Self:
        total = self.clusters * self.decisions
        if self.minibatch > total:
            raise ValueError(
                f"minibatch = {self.minibatch} is more than the {self.clusters} x "
                f"{self.decisions} = {total} decisions of an update; lower it"
            )
        if self.decisions % self.chunk:
            raise ValueError(f"chunk = {self.chunk} does not divide decisions = {self.decisions}")
        return self
