"""Rollout sources outside the simulator, by the training setting ``env``."""

from collections.abc import Mapping

from tailrace.integrations.live_training.rollout_source import LiveRollouts
from tailrace.integrations.vidur.rollout_source import VidurRollouts
from tailrace.learn.improve.rollout_source import RolloutSourceFactory

ROLLOUT_SOURCES: Mapping[str, RolloutSourceFactory] = {"vidur": VidurRollouts, "live": LiveRollouts}
