"""Operators, one file each. The floor of each, bytes or operations, is in its docstring."""
