"""Plan, fit, exact evaluation, checkpoints: where models, data and optimizers meet."""
