"""Checks of ``app.doctor``: this host, its libraries, a folder of slides."""
