"""Checks of ``app.doctor``: host, libraries, a folder of slides."""
