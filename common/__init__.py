"""Code that all commands share: exit codes, error messages, flags and atomic file writes."""
