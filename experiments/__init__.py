"""Programs that run or measure whole trainings: sweeps, the study, the benchmark. No training imports them."""
