"""Kernels, one operation a file."""
