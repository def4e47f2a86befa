"""How `data.prepare` writes a dataset, on any number of ranks."""
