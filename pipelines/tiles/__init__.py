"""Index of tiles: tissue of slides, and the tiles on it."""
