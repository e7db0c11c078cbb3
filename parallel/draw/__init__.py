"""Pictures of schedules; graphs of models as tables, JSON and DOT."""
