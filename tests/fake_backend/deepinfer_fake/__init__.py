"""A device that is not there, for tests: late streams, a memory pool, a few operators."""
