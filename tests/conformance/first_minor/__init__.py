"""The plugin interface as it was in its first minor version, and a backend that was written against it."""
