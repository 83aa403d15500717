"""Toy models whose right answers are known in closed form, as a plugin the engine loads like any other."""
