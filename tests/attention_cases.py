"""Random attention problems and how to judge an answer, as `jfa verify` has them: the tests' short name for them."""

from jfa.verify.cases import Case, judge, make, random_case

__all__ = ["Case", "judge", "make", "random_case"]
