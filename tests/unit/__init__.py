"""Plain classes, no Ray: the whole lot in seconds."""
