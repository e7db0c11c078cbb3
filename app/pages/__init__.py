"""The pages people read: of a run, of several, of a benchmark."""
