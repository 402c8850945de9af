"""Layers between whose linears everything is compiled, where Numba is installed (``aparte[fast]``)."""
