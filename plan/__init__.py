"""The plan: settings and their flags, recipes, the phases of a training, its folder. Plain Python, no TensorFlow."""
