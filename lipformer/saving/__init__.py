"""Models as files: weights and the JSON values that they are built from."""
