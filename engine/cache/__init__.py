"""KV cache: device pages, block allocation, the prefix tree, and swapping to host memory."""
