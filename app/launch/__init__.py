"""Processes of ranks: start, watch, restart, stop."""
