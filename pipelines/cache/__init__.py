"""Tiles kept on a disk as the reader gave them: sharded Zarr 3, shared by processes and runs."""
