"""Learned policies: the observation, the network with and without torch, and policy files."""
