"""Runs a model in every kind of company and finds where a bit moved."""
