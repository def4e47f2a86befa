"""Benchmarks, one file per question. Each measures bigbatch next to an alternative in one run. They are not tests."""
