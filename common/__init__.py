"""Code that all commands share: exit codes, error messages, flags and atomic file writes."""
VERSION = "0.2.0"
