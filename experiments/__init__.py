"""Programs that run or measure whole trainings: sweeps and the benchmark. No training imports them."""
