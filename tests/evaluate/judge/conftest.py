"""Fixtures of a small evaluation."""

from evaluated import changed, loaded, made, played

__all__ = ["changed", "loaded", "made", "played"]
