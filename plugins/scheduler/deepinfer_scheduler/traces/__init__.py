"""Where simulated requests come from: trace files of several shapes, and generators."""
