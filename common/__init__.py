"""What every command has in common: how it ends, what a user is told, and files that are written whole."""
