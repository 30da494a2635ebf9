"""The SQLite store: one file, one writer thread that commits in groups, readers beside it."""
