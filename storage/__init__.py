"""Stores for sessions, run records and events."""
