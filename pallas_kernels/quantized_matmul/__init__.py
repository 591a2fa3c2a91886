"""Matmuls with weights held in 8 or 4 bits."""

from pallas_kernels.quantized_matmul.api import (
    QuantizedTensor,
    dequantize,
    quantize,
    quantized_matmul,
)

__all__ = ["QuantizedTensor", "dequantize", "quantize", "quantized_matmul"]
