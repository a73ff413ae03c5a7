"""Imitation: learn from demonstrations."""
