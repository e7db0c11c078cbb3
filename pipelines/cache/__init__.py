"""Cache of decoded tiles on a disk: sharded Zarr 3, shared by processes and runs."""
