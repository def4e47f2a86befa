"""Observers to use and to copy. Nothing imports them; `--observer` loads them by name."""
