"""Connecting to a cluster, starting one, deploying to it, and the command line."""
