"""Engines that compute a training step: of schedules, and fully sharded."""
