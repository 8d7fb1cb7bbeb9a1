"""Triton kernels that multiply by a stored weight as it lies: its codes become numbers in registers, tile by tile.

Only `language` imports Triton, and nothing imports a kernel but `quant.device_products`, when one is to run.
"""
