"""The links of a TileStream, one transformation per module."""
