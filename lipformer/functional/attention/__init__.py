"""L2 self-attention on torch's fused kernels, and the weights it gives."""
