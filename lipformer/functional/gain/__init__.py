"""The gain of one head of L2 attention: the theorems of docs/theory, and the least of them."""
