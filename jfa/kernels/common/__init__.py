"""Jit helpers that several backends share, one small file a topic."""
