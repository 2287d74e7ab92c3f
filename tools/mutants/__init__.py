"""Faults put into the product on purpose, and the tests that must fail: what `tools/mutate.py` runs.

Each is a piece of text of one file, what stands there instead, and the tests that have to find it. The text must occur
exactly once, so that a mutant which the code has outgrown is noticed.
"""

from . import host, kernels
from .fault import Mutant

__all__ = ["MUTANTS", "Mutant"]

MUTANTS = (*kernels.MUTANTS, *host.MUTANTS)
