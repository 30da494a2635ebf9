"""Benchmarks: ratios beside a bare Ray hop that is measured in the same run. ``python -m benchmarks``."""
