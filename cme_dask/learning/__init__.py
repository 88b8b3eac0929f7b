"""Kernels, transforms, ridge and cells, chosen from rows in memory."""
