"""Models of others with their attention converted: the start, the table of classes, the adapters."""
