"""What a person is told unasked: before a training what will probably go wrong, and after it what to try."""
