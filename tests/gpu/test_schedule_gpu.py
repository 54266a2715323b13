"""Tile lists built on the device. The checks are `jfa verify`'s."""

from jfa.verify.list_checks import CHECKS

try:
    import pytest

    pytestmark = pytest.mark.gpu
    every_check = pytest.mark.parametrize
except ImportError:  # run_op.py calls these functions itself
    every_check = lambda *ignored: lambda function: function


@every_check("name", CHECKS)
def test_the_lists(name):
    CHECKS[name]()
