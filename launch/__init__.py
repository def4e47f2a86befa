"""Recipes, and scripts that start training on one machine or several."""
