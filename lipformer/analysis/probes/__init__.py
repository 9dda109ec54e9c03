"""The attention layers of a whole model, with the tokens that enter them."""
