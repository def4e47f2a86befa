"""Programs that run or measure whole trainings: sweep, rehearse, benchmark, verify. No training imports them."""
