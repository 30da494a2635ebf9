"""Tests of retinue.providers."""
