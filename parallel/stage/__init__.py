"""Execution of one stage: forward, backward, running statistics, random numbers."""
