"""Schedules and models as pictures, tables and text."""
