"""The request loop and everything around it."""
