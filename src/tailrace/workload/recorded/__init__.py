"""Recorded traffic for evaluation and training: conversations, halves, resampling, folders."""
