"""The only package that imports Horovod: the world of workers, the gradient exchange, lost and frozen workers, GPUs."""
