"""Catalog of the slides of a folder: search, open handles, checks, and failed slides."""
