"""The reference backend: every operator in plain torch, on any torch device.

It is the definition: slow wherever that is clearer.
"""
