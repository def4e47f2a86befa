"""Where a training runs: recipes, and scripts that start it on one machine or many."""
