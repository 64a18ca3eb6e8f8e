"""The measuring core of ``pantile bench`` and of the scripts in ``benchmarks/``.

cases: the catalogue of shapes. measure: timing. peers: other implementations. check: is what they
compute right? sweep: a case times its contenders. figures: results files and what they say.
command: the command.
"""
