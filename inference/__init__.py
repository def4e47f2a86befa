"""Uses a trained model: evaluates, exports and predicts from a checkpoint."""
