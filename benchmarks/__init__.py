"""Side-by-side measurements, one file a question; never run as tests."""
