"""Pictures, tables and text of schedules and models."""
