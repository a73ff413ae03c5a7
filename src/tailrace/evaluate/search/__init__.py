"""Searches over evaluations: capacity, cluster sizes, tuned constants, head-room of a reward."""
