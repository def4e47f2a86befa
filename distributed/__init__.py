"""The only package that communicates with other processes: launcher, world of workers, gradient exchange."""
