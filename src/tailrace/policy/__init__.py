"""Policies: built-in rules, learned policies, and how to find them by name."""
