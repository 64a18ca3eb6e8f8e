"""The measuring core of ``python -m pantile bench`` and of the scripts in ``benchmarks/``.

cases: the catalogue of shapes. measure: timing. peers: other implementations. check: is what they
compute right? sweep: cases times contenders, as a table and as JSON lines.
"""
