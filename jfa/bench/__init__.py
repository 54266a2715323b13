"""Measure attention on this machine: named shapes, peers, a runner, and results that record their origin."""
