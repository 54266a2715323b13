"""Jit helpers that several backends share, one small file per topic."""
