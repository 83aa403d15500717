"""Scheduling policies on the public contract alone, and a simulator to compare them."""
