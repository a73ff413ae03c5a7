"""Tailrace inside other systems: Vidur, Ray, and training on a live router."""
