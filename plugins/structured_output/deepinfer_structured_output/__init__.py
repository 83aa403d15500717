"""Structured output for DeepInfer."""
