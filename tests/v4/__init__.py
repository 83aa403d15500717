"""Small DeepSeek-V4 models for tests: drawn at random, saved in every format, with an oracle."""
