"""Plans for users: ``app.plan``, and ``--parallel auto``."""
