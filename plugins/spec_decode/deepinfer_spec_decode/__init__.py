"""Speculative decoding: drafters, confidence-scheduled verification, and calibration."""

__version__ = "0.1.0"
