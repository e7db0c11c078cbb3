"""Engines that compute a training step: by a schedule, or fully sharded."""
