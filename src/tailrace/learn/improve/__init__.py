"""Improvement by trial: roll-outs, advantages, PPO and branching."""
