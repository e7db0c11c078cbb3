"""Trials of strategies: each run as a user would run it, what it gave, and the page that shows it."""
