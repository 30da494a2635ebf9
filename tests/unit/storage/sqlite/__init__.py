"""The SQLite store alone: one file and those who use it, crashes, damage, full disks, versions."""
