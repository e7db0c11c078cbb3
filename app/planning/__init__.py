"""From a user's question to a plan: ``app.plan``, and ``--parallel auto``."""
