"""The KV cache: pages on the device, the plan of their blocks, the prefix tree, and host memory."""
