"""Who computes a training step: the engine of schedules, data parallelism, sharding, torch's own pipelines."""
