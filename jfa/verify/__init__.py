"""jfa verify: check and time everything on this machine's GPU, and write a result file to send.

`suite.py` is the table of jobs; `pool.py` runs them in child processes, which may hang or die; `record.py` is the file;
`numbers.py`, `op_checks.py` and `sparse_checks.py` are the checks, which the tests in tests/gpu run as well.
"""
