"""The host processor as a backend: its device, and providers faster than the reference."""
