"""Backends: the worlds the scheduler core can drive."""
