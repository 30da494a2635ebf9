"""The HTTP service on Ray Serve. Nothing is offered yet."""
