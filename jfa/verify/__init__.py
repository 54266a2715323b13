"""jfa verify: check and time everything on the GPU that is there, and write one file worth sending.

`suite.py` is the table of jobs; `pool.py` runs them in processes that may hang or die; `record.py` is the file; `numbers.py`,
`op_checks.py` and `sparse_checks.py` are the checks, which the tests in tests/gpu run as well.
"""
