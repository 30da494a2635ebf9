"""Tests of retinue.docqa."""
