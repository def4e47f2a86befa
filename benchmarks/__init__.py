"""Side-by-side measurements, one file per question. They never run as tests."""
