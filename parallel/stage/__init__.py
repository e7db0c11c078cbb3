"""One stage at work: forward, backward, running statistics, random numbers."""
