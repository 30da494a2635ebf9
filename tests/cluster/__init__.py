"""Tests with real processes: clusters that are started, refused, killed."""
