"""Communicators: one protocol and its implementations."""
