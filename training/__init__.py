"""One training: its parts, the loop, the step, exact evaluation, recovery, checkpoints."""
