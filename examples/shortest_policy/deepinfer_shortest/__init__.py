"""Shortest prompt first, as a scheduling policy."""
