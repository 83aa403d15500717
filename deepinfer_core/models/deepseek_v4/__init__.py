"""DeepSeek-V4: compressed sparse attention, hyper-connections, experts, and its draft modules."""
