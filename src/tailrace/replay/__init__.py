"""Recorded traffic simulated again: how well that agrees, and what could have been."""
