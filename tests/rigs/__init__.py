"""What tests and benchmarks share: emulated hosts, a Slurm cluster, forks, datasets, disturbed trainings."""
