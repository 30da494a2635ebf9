"""Questions to a folder of documents: the application behind `retinue demo`."""
