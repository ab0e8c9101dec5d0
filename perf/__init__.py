"""Benchmarks. A package, so that its modules never meet the tests' modules of the same names."""
