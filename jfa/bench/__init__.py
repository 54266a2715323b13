"""Measure attention on the machine at hand: named shapes, peers, a runner, and results that say where they come from."""
