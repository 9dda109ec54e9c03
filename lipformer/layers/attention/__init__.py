"""L2 multi-head self-attention: the layer, its masks, positions and cache, its bound."""
