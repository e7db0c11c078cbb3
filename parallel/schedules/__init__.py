"""Schedules as data: one pure function per family, from depth and number of microbatches to a compute-only list."""
