"""Runs the Metal source of `mx.fast.metal_kernel` kernels on a Linux CPU: results, faults, traffic (README.md)."""

from .compiler import CompileError, Unsupported
from .report import Report, Traffic
from .simulator import Findings, Simulator

__all__ = ["CompileError", "Findings", "Report", "Simulator", "Traffic", "Unsupported"]
