"""Where the tissue is, and the tiles on it: the index."""
