"""Kernels, one module a backend with the same function names; leaves that import no operator."""
