"""How a dataset gets onto the disk: what `data.prepare` does, on any number of ranks."""
