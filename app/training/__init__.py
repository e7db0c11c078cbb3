"""A training run: data, engine, loop, validation, run folder, summary."""
