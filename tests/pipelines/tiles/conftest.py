"""Indexes and fits of slides, made in this process unless a test asks for others."""

from tests.helpers.at_once import at_once, in_processes

__all__ = ["at_once", "in_processes"]
