"""Tests of the cluster floor that start no Ray."""
