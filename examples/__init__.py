"""Code to copy: a minimal training, batches alone, a network, an augmentation, observers. Nothing imports it."""
