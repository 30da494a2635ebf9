"""Stores for sessions, run records, events and artifacts: in memory, and in an SQLite file."""

from retinue.storage.holders import provably_gone, this_process
from retinue.storage.opening import default_url, is_relative, normalise_url, open_store

__all__ = ["default_url", "is_relative", "normalise_url", "open_store", "provably_gone", "this_process"]
