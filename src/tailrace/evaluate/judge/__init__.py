"""Comparing policies: suites, baselines, statistics and the results file."""
