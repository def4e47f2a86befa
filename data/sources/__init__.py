"""What a dataset is made from: one module a source."""
