"""Settings of PPO; no torch in here, so that the command line can read them quickly."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from tailrace.config import Positive, Settings

Weight = Annotated[float, Field(ge=0, le=1000, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]


class PpoSettings(Settings):
    """Proximal policy optimisation."""

    RENAMED: ClassVar = {
        "half_life_s": "discount_half_life_s",
        "trace_s": "gae_lambda_half_life_s",
        "trace": "gae_lambda",
        "imitation_rows": "imitation_batch_size",
        "group": "group_size",
        "schedule": "learning_rate_schedule",
        "clip": "clip_range",
        "gradient_clip": "max_grad_norm",
        "advantages": "advantage_normalisation",
        "discount": "discount_by",
        "start_kl": "start_kl_weight",
        "imitation": "imitation_weight",
    }

    clusters: Count = 64
    """Clusters that are played per update, over all roll-out tasks."""
    group_size: Count = 1
    """So many of them play the same requests, and are compared with each other per decision."""
    decisions: Count = 256
    """Decisions recorded per cluster and update."""
    warmup: int = Field(default=128, ge=0)
    """Decisions played before them, to fill the queues."""
    chunk: Count = 32
    """Decisions in a row that a network with memory is trained on at once."""
    epochs: Count = 4
    """Times each decision is learnt from."""
    minibatch: Count = 2048
    """Decisions per gradient step."""
    learning_rate: Positive = 3e-4
    """Step size of Adam."""
    learning_rate_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate falls to nothing over the updates of a run, if it does."""
    clip_range: float = Field(default=0.2, gt=0, lt=1)
    """How far the probability of a choice may move per update: by this share up or down."""
    value_weight: Weight = 0.5
    """Weight of the value's loss."""
    value_clip: Positive | None = None
    """How far a normalised value may move per update; none: freely."""
    max_grad_norm: Positive = 0.5
    """Largest norm of a gradient."""
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
    """Time after which a cost counts half (discount by time)."""
    gae_lambda_half_life_s: Positive = 15.0
    """GAE lambda as a half-life, s: how far into the future observed rewards are trusted over the
    value estimate (discount by time)."""
    gamma: float = Field(default=0.99, gt=0, lt=1)
    """Discount factor per decision (discount by decision)."""
    gae_lambda: float = Field(default=0.95, ge=0, le=1)
    """GAE lambda per decision (discount by decision)."""
    target_kl: Positive | None = None
    """KL divergence that an update should have or must not exceed."""
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
    imitation_batch_size: Count = 256
    """Demonstrations per gradient step."""
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
        if self.clusters % self.group_size:
            raise ValueError(
                f"group_size = {self.group_size} does not divide clusters = {self.clusters}"
            )
        if self.decisions % self.chunk:
            raise ValueError(f"chunk = {self.chunk} does not divide decisions = {self.decisions}")
        return self

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
