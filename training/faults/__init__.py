"""What befalls a long training, and what is done about it: a request to stop, a worker lost or frozen, a divergence."""
