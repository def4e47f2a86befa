"""Scripts that start training on one machine or several."""
