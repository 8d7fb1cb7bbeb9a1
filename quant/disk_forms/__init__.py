"""Weights as checkpoints of already quantized models hold them, one module for each method. Imports no torch."""
